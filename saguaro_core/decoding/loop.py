"""The one decoding loop. Its modes differ only in the source of candidates.

A round: take a proposal, run the target over 1 + K tokens, decide the outcome, tell the source at once (so that a
prepared speculation travels while we do our bookkeeping), then commit and report. A batch takes these same steps with
all of its loops, and shares the forward.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from saguaro_core.decoding.reporter import Reporter, Round, RunContext
from saguaro_core.decoding.sources import NOTHING, CandidateSource, NoDraft, Proposal, StopRequested
from saguaro_core.errors import DraftUnavailable, describe
from saguaro_core.events import DRAFT_LOST, RunFinished
from saguaro_core.verification import Outcome

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Turn:
    """A round whose outcome is open. `source` made the proposal: a draft lost while it is told the outcome does not
    change what this round was. `waited` is what the round stood still for a draft, also for one that never answered.
    """

    proposal: Proposal
    source: CandidateSource
    waited: float
    started: float


class DecodingLoop:
    """Decodes one run to its end."""

    def __init__(self, run: RunContext, source: CandidateSource) -> None:
        self.run_context, self.source = run, source
        self.reporter = Reporter(run)
        self.context = list(run.prompt)
        self.round_index = 0
        self._limit = run.answer.num_remaining
        self._draft_exhausted = False

    def run(self) -> RunFinished:
        """Decode until the answer ends, is stopped or fails. RunFinished says which; nothing is raised."""
        try:
            self.begin()
            self.prefill()
            while self.goes_on():
                turn = self.propose(self.run_context.clock())
                logits = self.run_context.target.verify(self.context, turn.proposal.token_ids)
                self.report(self.decide(turn, logits))
        except StopRequested:
            pass
        except Exception as error:  # Whatever went wrong, what was said so far is kept and the stream ends.
            return self.fail(error)
        return self.finish()

    def goes_on(self) -> bool:
        """Whether another round is wanted."""
        return self.run_context.answer.stop_reason is None and not self.run_context.should_stop()

    def finish(self) -> RunFinished:
        """End a run whose answer has ended, or that was stopped."""
        reason, spans = self.run_context.answer.stop_reason, self.source.end()
        if reason is None:
            return self.reporter.finish("stopped", "user", None, spans)
        return self.reporter.finish("finished", reason, None, spans)

    def fail(self, error: Exception) -> RunFinished:
        """End a run that cannot go on."""
        logger.error("run %s failed", self.run_context.run_id, exc_info=error)
        return self.reporter.finish("failed", "error", describe(error), self.source.end())

    def begin(self) -> None:
        """Hand the prompt to the source, which reads it while the target does."""
        self.reporter.phase("prefill", 0.0)
        self._guarded(self.source.begin)

    def prefill(self) -> None:
        """Read the prompt. Raises StopRequested."""
        run = self.run_context
        started = run.clock()
        for share in run.target.prefill(self.context, run.prefill_chunk):
            self.reporter.phase("prefill", share)
            if run.should_stop():
                raise StopRequested
        self.reporter.span("target", "prefill", started, run.clock(), 0)
        self.reporter.phase("decode")

    def propose(self, waiting_since: float) -> Turn:
        """Open a round with what the source proposes. Raises StopRequested."""
        waits = self.source.waits  # Asked first: a draft that is lost in the wait leaves a source without one.
        proposal = self._propose()
        started = self.run_context.clock()
        return Turn(proposal, self.source, started - waiting_since if waits else 0.0, started)

    def decide(self, turn: Turn, logits: Tensor) -> Round:
        """Close a round, whose logits are [1 + K, V]: its outcome is committed, and on its way to the source."""
        run, proposal = self.run_context, turn.proposal
        outcome = run.verifier.decide(logits, proposal, len(self.context))
        decided = run.clock()
        committed = [*proposal.token_ids[: outcome.accepted], outcome.bonus_token_id]
        self.context += committed
        run.target.keep(len(self.context) - 1)
        self._tell(outcome, committed)
        self.round_index += 1
        return Round(
            index=self.round_index - 1,
            proposal=proposal,
            outcome=outcome,
            logits=logits,
            committed=committed,
            bonus_origin=turn.source.bonus_origin,
            started=turn.started,
            decided=decided,
            waited=turn.waited,
        )

    def report(self, done: Round) -> None:
        """Emit what a round brought."""
        self.reporter.round(done)

    def _lookahead(self) -> int:
        """The most that may be drafted now: with its bonus token a round must not pass the answer's limit."""
        remaining = self._limit - (len(self.context) - len(self.run_context.prompt))
        return max(0, min(self.run_context.request.speculation.lookahead, remaining - 1))

    def _propose(self) -> Proposal:
        proposal = self._guarded(lambda: self.source.propose(self._lookahead())) or NOTHING
        self.reporter.draft_spans(proposal.spans)
        if proposal.is_exhausted and not self._draft_exhausted:
            self._draft_exhausted = True
            self.reporter.notice("The draft's context is full: the answer goes on without speculation.")
        return proposal

    def _tell(self, outcome: Outcome, committed: list[int]) -> None:
        """Send the outcome before any bookkeeping, unless these very tokens end the answer."""
        num_generated = len(self.context) - len(self.run_context.prompt)
        if num_generated < self._limit and self.run_context.eos_token_ids.isdisjoint(committed):
            self._guarded(lambda: self.source.update(self.round_index + 1, outcome, self._lookahead()))

    def _guarded(self, call: Callable[[], T]) -> T | None:
        """Call the source; if the draft is lost, the answer goes on as AR without losing or repeating a token."""
        try:
            return call()
        except DraftUnavailable as error:
            self.reporter.notice(f"{DRAFT_LOST}: {error} The answer goes on without it.")
            self.source = NoDraft()
            return None
