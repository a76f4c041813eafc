"""One link to the draft for all sequences of a batch.

Each sequence has a candidate source of its own, which sends and receives as if it were alone. What the sources send
is gathered until `flush`, so that the draft hears of all sequences at once and works on them together; its answer
is dealt out by epoch. A draft that is lost is lost to all of them.
"""

from collections import deque
from collections.abc import Callable

from saguaro_core.draft.messages import (
    BatchAnswer,
    BatchTurn,
    Begin,
    DraftFailed,
    End,
    Ended,
    Message,
    Speculation,
    Verified,
)
from saguaro_core.errors import DraftUnavailable

_SLICE_SECONDS = 0.05


class BatchLink:
    """send and receive are those of the draft process, as for a single source."""

    def __init__(
        self,
        send: Callable[[Message], None],
        receive: Callable[[float], Message | None],
        *,
        timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self._send, self._receive, self._timeout, self._clock = send, receive, timeout, clock
        self._inboxes: dict[int, deque[Message]] = {}
        self._begins: list[Begin] = []
        self._verified: list[Verified] = []
        self._ends: list[End] = []
        self._waiting_for: set[int] = set()
        self._sent_at = 0.0
        self._lost: DraftUnavailable | None = None

    # -- a source's side --------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Take a source's message; it leaves with the next flush. Raises DraftUnavailable."""
        if self._lost is not None:
            raise self._lost
        match message:
            case Begin():
                self._inboxes[message.epoch] = deque()
                self._begins.append(message)
            case Verified():
                self._verified.append(message)
            case End():
                # Nobody waits for the draft here: the others go on, and it reads this before what comes next.
                self._waiting_for.discard(message.epoch)
                self._ends.append(message)
                self._inboxes[message.epoch].append(Ended(epoch=message.epoch))
            case _:
                raise AssertionError(message)

    def receive(self, epoch: int) -> Message | None:
        """What has come for one source. Raises DraftUnavailable once the draft is lost."""
        inbox = self._inboxes[epoch]
        if inbox:
            return inbox.popleft()
        if self._lost is not None:
            raise self._lost
        return None

    # -- the batch's side -------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send what the sources have sent, as one message. Never raises: a lost draft shows when it is waited for."""
        begins, verified, ends = self._begins, self._verified, self._ends
        self._begins, self._verified, self._ends = [], [], []
        if self._lost is not None or not (begins or verified or ends):
            return
        self._waiting_for |= {message.epoch for message in begins} | {message.epoch for message in verified}
        self._sent_at = self._clock()
        try:
            self._send(BatchTurn(begins=tuple(begins), verified=tuple(verified), ends=tuple(ends)))
        except DraftUnavailable as error:
            self._lose(error)

    def wait(self) -> bool:
        """Wait for the draft's answer for a moment; whether there is nothing more to wait for."""
        if not self._waiting_for:
            return True
        try:
            self._take(self._receive(_SLICE_SECONDS))
            if self._waiting_for and self._clock() - self._sent_at > self._timeout:
                raise DraftUnavailable(f"the draft did not answer within {self._timeout:g} s.")
        except DraftUnavailable as error:
            self._lose(error)
        return not self._waiting_for

    def _take(self, message: Message | None) -> None:
        if isinstance(message, BatchAnswer):
            parts: tuple[Speculation | DraftFailed, ...] = (*message.speculations, *message.failures)
            for part in parts:
                if part.epoch is not None and part.epoch in self._waiting_for:
                    self._waiting_for.discard(part.epoch)
                    self._inboxes[part.epoch].append(part)
        elif isinstance(message, DraftFailed) and (message.epoch is None or message.epoch in self._waiting_for):
            raise DraftUnavailable(message.message)

    def _lose(self, error: DraftUnavailable) -> None:
        self._lost = error
        self._waiting_for.clear()
