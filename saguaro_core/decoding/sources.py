"""Where candidates come from: nowhere (AR) or the draft process (SD and SSD). The loop never asks which.

SD and SSD speak the same protocol with the same process; only what the draft does while the target verifies differs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from saguaro_core.draft.messages import Begin, DraftFailed, DraftSpan, End, Ended, Message, Speculation, Verified
from saguaro_core.errors import DraftUnavailable
from saguaro_core.events import CacheOutcome, DraftEstimates, FallbackKind, Origin, Served
from saguaro_core.verification import DraftDistributions, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Tokens to verify in one round. `distributions` is None for deterministic proposals and where the rule needs
    none.
    """

    token_ids: list[int]
    origin: Origin = "draft"
    q: tuple[float, ...] = ()
    distributions: DraftDistributions | None = None
    cache: CacheOutcome | None = None
    fallback: FallbackKind | None = None
    fan_out: tuple[int, ...] = ()
    prepared: tuple[tuple[int, tuple[int, ...]], ...] = ()
    draft_seconds: float = 0.0
    spans: tuple[DraftSpan, ...] = ()
    is_exhausted: bool = False
    served: Served | None = None
    estimates: DraftEstimates | None = None


NOTHING = Proposal(token_ids=[])

# A stopped run ends at once even if its draft hangs or reads a long prompt: what it sends later carries an old epoch.
_LONGEST_END = 2.0


class StopRequested(Exception):
    """The user stopped the run while the target was waiting for the draft."""


class CandidateSource(ABC):
    """Proposes tokens for each round and learns what became of them."""

    bonus_origin: Origin = "bonus"
    waits: bool = True

    @abstractmethod
    def begin(self) -> None:
        """Start a request; the first proposal may be under way when this returns."""

    @abstractmethod
    def propose(self, lookahead: int) -> Proposal:
        """At most `lookahead` tokens for the coming round. Raises DraftUnavailable or StopRequested."""

    @abstractmethod
    def update(self, round_index: int, outcome: Outcome, lookahead: int) -> None:
        """Tell the outcome; the proposal for round `round_index` may then hold up to `lookahead` tokens."""

    @abstractmethod
    def end(self) -> tuple[DraftSpan, ...]:
        """Finish the request; the work that no proposal carried. Never raises."""


class NoDraft(CandidateSource):
    """AR: the target alone."""

    bonus_origin: Origin = "target"
    waits = False

    def begin(self) -> None:
        """Nothing to start."""

    def propose(self, lookahead: int) -> Proposal:
        """No candidates."""
        return NOTHING

    def update(self, round_index: int, outcome: Outcome, lookahead: int) -> None:
        """Nothing to learn."""

    def end(self) -> tuple[DraftSpan, ...]:
        """Nothing was done."""
        return ()


class DraftSource(CandidateSource):
    """SD and SSD: the draft process behind a pair of functions.

    send(message) sends; receive(seconds) returns the next message or None. Both raise DraftUnavailable when the
    process is gone.
    """

    def __init__(
        self,
        begin: Begin,
        send: Callable[[Message], None],
        receive: Callable[[float], Message | None],
        *,
        token_ids: torch.Tensor | None,
        num_columns: int,
        timeout: float,
        should_stop: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._begin, self._send, self._receive = begin, send, receive
        self._token_ids, self._num_columns = token_ids, num_columns
        self._timeout, self._should_stop, self._clock = timeout, should_stop, clock
        self._taken = 0.0

    def begin(self) -> None:
        """Hand the prompt over; the draft reads it while the target does."""
        self._send(self._begin)

    def propose(self, lookahead: int) -> Proposal:
        """Wait for the draft's speculation, in slices, so that a stop or the draft's end is seen at once."""
        deadline = self._clock() + self._timeout
        while self._clock() < deadline:
            message = self._receive(0.05)
            if isinstance(message, Speculation) and message.epoch == self._begin.epoch:
                self._taken = self._clock()
                return self._proposal(message, lookahead)
            if isinstance(message, DraftFailed) and message.epoch == self._begin.epoch:
                raise DraftUnavailable(message.message)
            if message is None and self._should_stop():
                raise StopRequested
        raise DraftUnavailable(f"the draft did not answer within {self._timeout:g} s.")

    def update(self, round_index: int, outcome: Outcome, lookahead: int) -> None:
        """Send the verdict; the draft's answer is picked up by the next propose."""
        self._send(
            Verified(
                epoch=self._begin.epoch,
                round_index=round_index,
                accepted=outcome.accepted,
                bonus_token_id=outcome.bonus_token_id,
                lookahead=lookahead,
                verify_seconds=max(0.0, self._clock() - self._taken),
            )
        )

    def end(self) -> tuple[DraftSpan, ...]:
        """Let the draft forget the request and wait, briefly, until it has."""
        spans: tuple[DraftSpan, ...] = ()
        deadline = self._clock() + min(self._timeout, _LONGEST_END)
        try:
            self._send(End(epoch=self._begin.epoch))
            while self._clock() < deadline:
                message = self._receive(0.05)
                if isinstance(message, Speculation) and message.epoch == self._begin.epoch:
                    spans += message.spans
                if isinstance(message, Ended) and message.epoch == self._begin.epoch:
                    return spans + message.spans
        except DraftUnavailable:
            pass  # The owner of the process finds it gone before the next run.
        return spans

    def _proposal(self, message: Speculation, lookahead: int) -> Proposal:
        token_ids = list(message.token_ids[:lookahead])
        distributions = None
        if message.distributions and token_ids:
            values = np.frombuffer(message.distributions, dtype=np.float32).reshape(-1, self._num_columns)
            q = torch.from_numpy(values[: len(token_ids)].copy())
            distributions = DraftDistributions(q, self._token_ids)
        return Proposal(
            token_ids=token_ids,
            origin=_origin(message),
            q=message.q[:lookahead],
            distributions=distributions,
            cache=message.cache,
            fallback=message.fallback,
            fan_out=message.fan_out,
            prepared=message.prepared,
            draft_seconds=message.draft_seconds,
            spans=message.spans,
            is_exhausted=message.exhausted,
            served=message.served,
            estimates=message.estimates,
        )


def _origin(message: Speculation) -> Origin:
    if message.cache is None:
        return "draft"
    return "cache_hit" if message.cache == "hit" else "fallback"
