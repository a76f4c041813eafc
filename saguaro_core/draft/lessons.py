"""What the rounds of one request teach the draft: the shape of the cache, the backup, and the times it decides by."""

from dataclasses import dataclass

from torch import Tensor

from saguaro_core.config import SpeculationConfig
from saguaro_core.draft.branches import Drafted
from saguaro_core.draft.proposer import Proposer
from saguaro_core.events import DraftEstimates
from saguaro_core.fallback import FallbackChooser
from saguaro_core.fan_out import CacheState, FanOutPlanner
from saguaro_core.service import RunTimes
from saguaro_core.verification import Outcome

# The power law is fitted where caches operate: a bonus token ranked beyond this counts as "not among the first 64".
RANKS_KEPT = 64


@dataclass(frozen=True, slots=True)
class _Unranked:
    """A finished round whose bonus token has not been ranked yet; `drafted_there` was drafted in the bonus token's
    place.
    """

    state: CacheState
    num_drafted: int
    outcome: Outcome
    rank_scores: Tensor | None
    drafted_there: int | None


class Lessons:
    """Estimates of one request, from its own rounds."""

    def __init__(self, speculation: SpeculationConfig, batch_size: int = 1) -> None:
        self.planner = FanOutPlanner(speculation)
        self.chooser = FallbackChooser(speculation.fallback, batch_size)
        self.times = RunTimes()
        self._unranked: _Unranked | None = None

    def observe(self, drafted: Drafted, outcome: Outcome, verify_seconds: float, waited: float, seconds: float) -> None:
        """Remember what a round showed; its ranking is read later, off the target's critical path.

        verify_seconds: as the target says, 0 if it does not. waited: since the speculation was served. seconds: since
        the outcome before this one.
        """
        known = drafted.rank_scores[outcome.accepted] if outcome.accepted < len(drafted.rank_scores) else None
        next_drafted = next(iter(drafted.token_ids[outcome.accepted : outcome.accepted + 1]), None)
        num_drafted = len(drafted.token_ids)
        self._unranked = _Unranked(drafted.state, num_drafted, outcome, known, next_drafted)
        self.chooser.observe_round(drafted.state == "hit", outcome.accepted, verify_seconds or waited)
        self.times.observe_round(drafted.source, num_drafted, outcome.accepted, verify_seconds, seconds)

    def read_ranking(self, proposer: Proposer) -> None:
        """Feed the last round to the fan-out's estimates: where among the candidates was the real bonus token?"""
        seen, self._unranked = self._unranked, None
        if seen is None:
            return
        rank, num_kept = None, 0
        if seen.rank_scores is not None:
            num_kept = RANKS_KEPT
            rank = proposer.rank(seen.rank_scores, seen.outcome.bonus_token_id, seen.drafted_there)
            rank = rank if rank is not None and rank <= num_kept else None
        self.planner.observe(seen.state, seen.num_drafted, seen.outcome.accepted, rank, num_kept)

    def estimates(self, num_reused: int) -> DraftEstimates:
        """What is known now, for the record."""
        hit, miss = self.planner.estimates["hit"], self.planner.estimates["miss"]
        return DraftEstimates(
            acceptance_hit=hit.acceptance,
            power_law_r_hit=hit.power_law_r,
            acceptance_miss=miss.acceptance,
            power_law_r_miss=miss.power_law_r,
            critical_batch_size=self.chooser.critical_batch_size(),
            num_reused=num_reused,
        )
