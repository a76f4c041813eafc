"""What the rounds of one request teach the draft: the shape of the cache, the backup, and the times it decides by."""

from dataclasses import dataclass

from torch import Tensor

from saguaro_core.config import ServicePolicy, SpeculationConfig
from saguaro_core.deepening import is_worth_its_time
from saguaro_core.draft.branches import Branches, Drafted
from saguaro_core.draft.proposer import Proposer
from saguaro_core.events import DraftEstimates
from saguaro_core.fallback import FallbackChooser
from saguaro_core.fan_out import CacheState, FanOutPlanner
from saguaro_core.service import RunTimes, TokenSource
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
    """Estimates of one request, from its own rounds, and what follows from them.

    must_be_full: nothing follows from times: every speculation is served in full, whatever the request's service, and
    auto is the neural backup.
    """

    def __init__(self, speculation: SpeculationConfig, batch_size: int = 1, *, must_be_full: bool = False) -> None:
        self._service: ServicePolicy = "full" if must_be_full else speculation.service
        self.planner = FanOutPlanner(speculation)
        is_timed = speculation.fallback == "auto" and must_be_full
        self.chooser = FallbackChooser("neural" if is_timed else speculation.fallback, batch_size)
        self.times = RunTimes(batch_size=batch_size)
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
        # The first round had no cache to look into.
        is_hit = None if self.times.num_rounds == 0 else drafted.state == "hit"
        self.chooser.observe_round(is_hit, outcome.accepted, verify_seconds or waited)
        self.times.observe_round(drafted.source, num_drafted, outcome.accepted, verify_seconds, seconds)
        # Steps are for sequences that missed: this one, and of the others as many as do.
        size = self.times.batch_size
        self.times.waiting = size / (1 + (size - 1) * (1 - self.chooser.hit_rate.value))

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

    def length(self, source: TokenSource, ready: int, count: int, *, otherwise: int) -> int:
        """How many of at most `count` tokens to serve when `ready` are there; `otherwise` where times do not say.

        Known before any further token is made, and from earlier rounds only: so no rule's exactness depends on it.
        """
        if self._service == "full":
            return count
        best = self.times.length(source, ready, count) if self._service == "auto" else None
        return otherwise if best is None else best

    def prefers_lookup(self, source: TokenSource, found: int, count: int) -> bool:
        """Whether `auto`, which would draft now, should rather serve the `found` tokens of a lookup."""
        is_free = self._service == "auto" and self.chooser.policy == "auto"
        return is_free and found > 0 and self.times.prefers_lookup(source, found, count)

    def likely_outcomes(
        self, drafted: Drafted, proposer: Proposer, eos: set[int]
    ) -> tuple[tuple[int, ...], list[tuple[Outcome, float]]]:
        """The shape of the cache for this speculation, and the outcomes that fill it, each with its probability."""
        fan_out = self.planner.shape(len(drafted.token_ids), drafted.state)
        chances = self.planner.outcome_probabilities(fan_out, drafted.state)
        ranked = []
        for k, (count, rank_scores) in enumerate(zip(fan_out, drafted.rank_scores, strict=True)):
            # After a rejection the bonus cannot be the rejected token; after an end-of-turn token there is no next
            # round.
            excluded = eos | set(drafted.token_ids[k : k + 1])
            tokens = proposer.candidates(rank_scores, count, excluded)
            ranked += [(Outcome(k, token), chance) for token, chance in zip(tokens, chances[k], strict=False)]
        return fan_out, ranked

    def worthy_branches(self, branches: Branches, num_drafted: int, elapsed: float) -> list[int]:
        """The branches that the next pass should take, `elapsed` seconds after the speculation was served; none if it
        is not worth its time.
        """
        times, passes = self.times, self.times.branch_pass
        chosen, worth = branches.worthiest(times.acceptance("hit"), passes.fixed, passes.per_row)
        if times.rate is None or not chosen:
            return chosen
        seconds_left = times.verify.seconds(1 + num_drafted) - elapsed
        return chosen if is_worth_its_time(worth, passes.seconds(len(chosen)), seconds_left, times.rate) else []

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
