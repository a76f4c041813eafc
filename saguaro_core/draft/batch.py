"""The draft's side of a batch: a speculator for each sequence, in a cache row of its own, all driven together.

Fallbacks of several sequences are drafted by common forwards, and so are their caches. A sequence whose speculator
fails is reported and goes on without a draft; the others do not notice.
"""

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from saguaro_core.draft.messages import BatchAnswer, BatchTurn, Begin, DraftFailed, Speculation, Verified
from saguaro_core.draft.speculator import Speculator
from saguaro_core.errors import SaguaroError, describe
from saguaro_core.models.rows import RowRunner
from saguaro_core.models.runner import Runner
from saguaro_core.models.steps import Steps, drive_together
from saguaro_core.verification import Outcome

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The cache's first row keeps the text of the runs that are decoded alone.
_FIRST_ROW = 1


class BatchSpeculator:
    """Speculates for one batch at a time. `make_speculator` makes one over a runner of its own."""

    def __init__(self, runner: Runner, make_speculator: Callable[[Runner], Speculator]) -> None:
        self.runner, self._make_speculator = runner, make_speculator
        self._rows: dict[int, int] = {}  # by epoch
        self._speculators: dict[int, Speculator] = {}  # by row
        self._errors: dict[int, str] = {}  # by epoch

    @property
    def is_building(self) -> bool:
        """Whether any sequence's cache is under construction."""
        return any(speculator.is_building for speculator in self._speculators.values())

    def take(self, turn: BatchTurn) -> BatchAnswer | None:
        """The answer to all that a turn began or verified; None where it only says who has left."""
        if turn.begins:
            self.clear()
        for end in turn.ends:
            self._leave(end.epoch)
        works: dict[int, Steps[Speculation]] = {}
        for row, begin in enumerate(turn.begins, start=_FIRST_ROW):
            works[row] = self._begin(row, begin, len(turn.begins))
        for message in turn.verified:
            row_of = self._rows.get(message.epoch)
            if row_of is not None:
                works[row_of] = self._verified(row_of, message)
        speculations = self._drive(works)
        asked = [message.epoch for message in turn.begins] + [message.epoch for message in turn.verified]
        if not asked:
            return None
        return BatchAnswer(
            speculations=tuple(speculations),
            failures=tuple(self._failure(epoch) for epoch in asked if epoch not in self._rows),
        )

    def build_step(self) -> None:
        """One forward for all caches under construction."""
        building = {row: speculator for row, speculator in self._speculators.items() if speculator.is_building}
        self._drive({row: speculator.build_in_steps() for row, speculator in building.items()})

    def clear(self) -> None:
        """Forget the batch and give its memory back."""
        self._rows, self._speculators, self._errors = {}, {}, {}
        self.runner.keep_rows(_FIRST_ROW)

    def _begin(self, row: int, begin: Begin, batch_size: int) -> Steps[Speculation]:
        speculator = self._speculators[row] = self._make_speculator(RowRunner(self.runner, row))
        self._rows[begin.epoch] = row
        return speculator.begin_in_steps(begin, batch_size)

    def _verified(self, row: int, message: Verified) -> Steps[Speculation]:
        outcome = Outcome(message.accepted, message.bonus_token_id)
        return self._speculators[row].verified_in_steps(
            message.round_index, outcome, message.lookahead, message.verify_seconds
        )

    def _drive(self, works: dict[int, Steps[T]]) -> list[T]:
        """Drive works by their rows; what they return. A sequence whose work fails leaves."""
        outcomes: Mapping[int, T | Exception]
        try:
            outcomes = drive_together(self.runner, works)
        except Exception as error:  # A common forward failed: it cannot be told whose fault it is.
            outcomes = dict.fromkeys(works, error)
        for row, outcome in outcomes.items():
            if isinstance(outcome, Exception):
                self._fail(row, outcome)
        return [outcome for outcome in outcomes.values() if not isinstance(outcome, Exception)]

    def _fail(self, row: int, error: Exception) -> None:
        if not isinstance(error, SaguaroError):
            logger.error("the draft failed for one sequence of a batch", exc_info=error)
        (epoch,) = (epoch for epoch, of in self._rows.items() if of == row)
        self._errors[epoch] = describe(error)
        self._leave(epoch)

    def _failure(self, epoch: int) -> DraftFailed:
        reason = self._errors.get(epoch, "the draft does not know this sequence.")
        return DraftFailed(message=reason, epoch=epoch)

    def _leave(self, epoch: int) -> None:
        row = self._rows.pop(epoch, None)
        if row is not None:
            del self._speculators[row]
        if not self._rows:
            self.runner.keep_rows(_FIRST_ROW)
