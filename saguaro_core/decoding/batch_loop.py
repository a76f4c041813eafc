"""Decodes several runs together: their loops take the same steps at the same time, and share every verification.

A round waits until the draft has answered for all sequences, so one miss makes all of them wait for its backup. What
each sequence says, when it ends and what becomes of it is its own affair: whatever happens to one, no other loses
anything.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeVar

from torch import Tensor

from saguaro_core.decoding.batch_link import BatchLink
from saguaro_core.decoding.loop import DecodingLoop, Turn
from saguaro_core.decoding.sources import StopRequested
from saguaro_core.models.rows import forward_together
from saguaro_core.models.runner import Runner

logger = logging.getLogger(__name__)

T = TypeVar("T")


class BatchLoop:
    """Decodes a batch to the end of its last sequence.

    `loops` are keyed by the target's cache row that each loop's session works in, and lose those that have ended.
    `link` is the one that their sources share; None without a draft.
    """

    def __init__(self, loops: Mapping[int, DecodingLoop], runner: Runner, link: BatchLink | None) -> None:
        self.loops, self.runner, self.link = dict(loops), runner, link
        self._clock = next(iter(loops.values())).run_context.clock

    def run(self) -> None:
        """Decode until every run has ended, each with its own RunFinished. Nothing is raised."""
        self._each(lambda row, loop: loop.begin())
        self._flush()
        # The highest cache row first, so that the cache grows once.
        self._each(lambda row, loop: loop.prefill(), reversed(self.loops))
        self._end_those_done()
        while self.loops:
            self._round()
        self._flush()

    def _round(self) -> None:
        waiting_since = self._clock()
        self._await_draft()
        turns = self._each(lambda row, loop: loop.propose(waiting_since))
        if not turns:  # All were stopped while they waited.
            return
        logits = self._verify(turns)
        done = self._each(lambda row, loop: loop.decide(turns[row], logits[row]))
        self._flush()
        self._each(lambda row, loop: loop.report(done[row]))
        self._end_those_done()

    def _verify(self, turns: dict[int, Turn]) -> dict[int, Tensor]:
        """One forward for all sequences. If it fails each is tried alone, so that the fault stays with its own."""
        try:
            return self._verify_together(turns)
        except Exception as error:
            logger.warning("a batch of %d could not be verified together: %s", len(turns), error)
        return self._each(lambda row, loop: loop.run_context.target.verify(loop.context, turns[row].proposal.token_ids))

    def _verify_together(self, turns: dict[int, Turn]) -> dict[int, Tensor]:
        drafted = {row: turn.proposal.token_ids for row, turn in turns.items()}
        sessions = {row: self.loops[row].run_context.target for row in turns}
        contexts = {row: self.loops[row].context for row in turns}
        batches = [sessions[row].verification(contexts[row], drafted[row]) for row in turns]
        logits: dict[int, Tensor] = {}
        for row, rows_logits in zip(turns, forward_together(self.runner, batches, list(turns)), strict=True):
            assert rows_logits is not None
            logits[row] = rows_logits[0]
        for row, session in sessions.items():
            session.verified(contexts[row], drafted[row])
        return logits

    # -- one for all, and each for itself ---------------------------------------------------------------------------

    def _each(self, step: Callable[[int, DecodingLoop], T], rows: Iterable[int] | None = None) -> dict[int, T]:
        """Take a step with every loop, in the order of `rows` or theirs; one that stops or fails in it leaves, the
        others do not notice.
        """
        results: dict[int, T] = {}
        for row in list(self.loops if rows is None else rows):
            loop = self.loops[row]
            try:
                results[row] = step(row, loop)
            except StopRequested:
                self._leave(row, loop.finish)
            except Exception as error:
                self._leave(row, partial(loop.fail, error))
        return results

    def _end_those_done(self) -> None:
        going_on = self._each(lambda row, loop: loop.goes_on())
        for row, loop in list(self.loops.items()):
            if not going_on[row]:
                self._leave(row, loop.finish)

    def _leave(self, row: int, end: Callable[[], object]) -> None:
        run_id = self.loops.pop(row).run_context.run_id
        try:
            end()
        except Exception:  # Whoever listens to this run is lost; the others are not.
            logger.exception("run %s could not be ended", run_id)

    # -- the draft --------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        if self.link is not None:
            self.link.flush()

    def _await_draft(self) -> None:
        """Wait until the draft has answered for every sequence that still goes on; a stop is seen at once."""
        while self.link is not None and self.loops and not self.link.wait():
            self._end_those_done()
            self._flush()
