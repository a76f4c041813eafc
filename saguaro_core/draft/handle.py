"""The engine's hold on the draft process: start, load, exchange messages, notice its end, start it again."""

import logging
import time
from collections.abc import Callable

import torch

from saguaro_core.decoding.sources import StopRequested
from saguaro_core.draft.child import Child
from saguaro_core.draft.messages import DraftFailed, DraftLoaded, LoadDraft, Message
from saguaro_core.errors import DraftUnavailable
from saguaro_core.status import ModelInfo

logger = logging.getLogger(__name__)

MODULE = "saguaro_core.draft.process"


class DraftHandle:
    """Owns one draft process at a time. Not thread-safe."""

    def __init__(self, load_timeout: float, module: str = MODULE) -> None:
        self._load_timeout, self._module = load_timeout, module
        self._load: LoadDraft | None = None
        self._child: Child | None = None
        self._load_deadline = 0.0
        self.info: ModelInfo | None = None
        self.token_ids: torch.Tensor | None = None
        self.num_columns = 0
        self.error: str | None = None
        self.epoch = 0

    def start(self, load: LoadDraft) -> None:
        """Start the process and let it load while the caller does other things."""
        self.close()
        self._load = load
        self.info, self.error = None, None
        self._child = Child.spawn(self._module)
        self._child.link.send(load)
        self._load_deadline = time.monotonic() + self._load_timeout

    def wait_loaded(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until the draft can serve. Raises DraftUnavailable with the reason, which `error` keeps, or
        StopRequested as soon as `should_stop` says so; the draft then goes on loading.
        """
        if self.info is not None:
            return
        if self.error is not None:
            raise DraftUnavailable(self.error)
        try:
            self._take(self._await_load(should_stop))
        except DraftUnavailable as error:
            self.error = str(error)
            raise

    def ensure_loaded(self, should_stop: Callable[[], bool]) -> None:
        """Like wait_loaded, but a process that has died since it was last used is started again, once."""
        self.recover(was_lost=False)
        try:
            self.wait_loaded(should_stop)
        except DraftUnavailable:
            if self.pid is not None:
                raise
            self.recover(was_lost=False)
            self.wait_loaded(should_stop)

    def _await_load(self, should_stop: Callable[[], bool]) -> Message:
        while True:
            # Read before looking at the clock: the draft may have loaded long ago, while nobody asked for it.
            message = self.receive(0.2)
            if isinstance(message, (DraftLoaded, DraftFailed)):
                return message
            if should_stop():
                raise StopRequested
            if time.monotonic() >= self._load_deadline:
                break
        raise DraftUnavailable(f"the draft did not load within {self._load_timeout:g} s.")

    def _take(self, message: Message) -> None:
        if isinstance(message, DraftFailed):
            raise DraftUnavailable(message.message)
        assert isinstance(message, DraftLoaded)
        self.info, self.num_columns = message.info, message.num_columns
        self.token_ids = torch.tensor(message.token_ids) if message.token_ids else None

    def send(self, message: Message) -> None:
        """Queue a message. Raises DraftUnavailable when the process has ended."""
        self._living().link.send(message)

    def receive(self, timeout: float) -> Message | None:
        """The next message or None. Raises DraftUnavailable when the process has ended and left nothing to read."""
        if self._child is None:
            raise DraftUnavailable("the draft process is not running.")
        message = self._child.link.receive(timeout)
        if message is None:
            self._living()
        return message

    def _living(self) -> Child:
        if self._child is None:
            raise DraftUnavailable("the draft process is not running.")
        if not self._child.is_alive:
            raise DraftUnavailable(f"the draft process {self._child.describe_end()}.")
        return self._child

    @property
    def pid(self) -> int | None:
        """The process's id while it runs."""
        return self._child.process.pid if self._child is not None and self._child.is_alive else None

    def next_epoch(self) -> int:
        """A number for a new request: answers that carry another one are old."""
        self.epoch += 1
        return self.epoch

    def recover(self, was_lost: bool) -> None:
        """If the draft was lost in a run (dead, hung or confused) or has died since, end what is left of it and start a
        new one. A draft that could not be loaded is not tried again: its process lives and says why.
        """
        is_gone = self._child is not None and self.pid is None
        if self._load is not None and (was_lost or is_gone):
            logger.warning("the draft process is started again")
            self._kill()
            self.start(self._load)

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._child is not None:
            self._child.close()
            self._child = None
