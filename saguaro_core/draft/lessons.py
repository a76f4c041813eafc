"""What the rounds of one request teach the draft: the shape of the cache, the backup, and the times it decides by."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from saguaro_core.confidence import Confidence
from saguaro_core.config import ServicePolicy, SpeculationConfig
from saguaro_core.deepening import best_rows, is_worth_its_time
from saguaro_core.draft.branches import Branches, Drafted
from saguaro_core.draft.proposer import Proposer
from saguaro_core.events import DraftEstimates
from saguaro_core.fallback import FallbackChooser, LookupKind
from saguaro_core.fan_out import CacheState, FanOutPlanner
from saguaro_core.service import NextToken, RunTimes
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
        self.confidence = Confidence()
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
        self.times.observe_round(drafted.source, num_drafted, outcome.accepted, verify_seconds, seconds, len(drafted.q))
        self.confidence.observe(drafted.q, outcome.accepted)
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

    def acceptances(self, drafted: Drafted) -> list[float]:
        """For each drafted token the probability that it is accepted if those before it are."""
        if drafted.q or drafted.guessed or drafted.source is None:
            return [*(self.confidence.acceptance(q) for q in drafted.q), *drafted.guessed]
        return [self.times.acceptance(drafted.source)] * len(drafted.token_ids)

    def length(self, q: Sequence[float], count: int) -> int:
        """How many to serve of tokens that are ready, with these probabilities; at most `count`."""
        ready = q[:count]
        if self._service != "auto":
            return len(ready)
        best = self.times.length([self.confidence.acceptance(value) for value in ready])
        return len(ready) if best is None else best

    def lookup_length(self, kind: LookupKind, found: int) -> int:
        """How many to serve of the tokens that lookup found."""
        if kind == "none" or self._service != "auto":
            return found
        best = self.times.length([self.times.acceptance(kind)] * found)
        return found if best is None else best

    def next_token(self, drafted: Drafted, share: float) -> NextToken:
        """How the speculation goes on while the target waits: with one more token of the draft, with a guess that is
        right with probability `share` (0: there is none), or not at all.
        """
        if self._service == "full":
            return "drafted"
        choice = None
        if self._service == "auto":
            # After a hit the target does not wait: the draft's time is better spent on the next cache.
            source = None if drafted.guessed or drafted.source == "hit" else drafted.source
            choice = self.times.next_token(source, math.prod(self.acceptances(drafted)), share)
        # Before times say anything nothing is cut and nothing is drafted on.
        return ("nothing" if drafted.source == "hit" else "drafted") if choice is None else choice

    def prefers_lookup(self) -> bool:
        """Whether a miss should be served by what lookup finds, or nothing, and the draft should not be asked."""
        is_by_token = self._service == "auto" and self.chooser.policy == "auto" and self.times.rate is not None
        return not is_by_token and self.chooser.choose() == "fast"

    @property
    def guesses_after_hit(self) -> bool:
        """Whether guesses may stand behind the tokens of a branch."""
        return self._service == "auto"

    @property
    def guesses_after_miss(self) -> bool:
        """Whether guesses may stand behind the draft's tokens, or in their place."""
        return self._service == "auto" and self.chooser.policy == "auto"

    def likely_outcomes(
        self, drafted: Drafted, proposer: Proposer, eos: set[int]
    ) -> tuple[tuple[int, ...], list[tuple[Outcome, float]]]:
        """The shape of the cache for this speculation, and the outcomes that fill it, each with its probability."""
        acceptances = self.acceptances(drafted)
        # q' reduces as many candidates of a position as its shape says, before what is drawn there is known.
        is_drawn = proposer.draws_tokens
        planner, state = self.planner, drafted.state
        fan_out = planner.shape(len(acceptances), state) if is_drawn else planner.shape_for(acceptances, state)
        chances = planner.outcome_probabilities(fan_out, acceptances, state)
        ranked = []
        for k, (count, rank_scores) in enumerate(zip(fan_out, drafted.rank_scores, strict=True)):
            # After a rejection the bonus cannot be the rejected token; after an end-of-turn token there is no next
            # round.
            excluded = eos | set(drafted.token_ids[k : k + 1])
            tokens = proposer.candidates(rank_scores, count, excluded)
            ranked += [(Outcome(k, token), chance) for token, chance in zip(tokens, chances[k], strict=False)]
        return fan_out, ranked

    def worthy_branches(self, branches: Branches, num_drafted: int, elapsed: float, num_parts: int) -> list[int]:
        """The branches that the next pass should take, `elapsed` seconds after the speculation was served; none if it
        is not worth its time. The verdict interrupts the pass after one of its `num_parts` parts.
        """
        times, passes = self.times, self.times.branch_pass
        worth = {branch: self._worth(branches, branch) for branch in branches.unfinished()}
        ranked = sorted(worth, key=worth.__getitem__, reverse=True)
        chosen = ranked[: best_rows([worth[branch] for branch in ranked], passes.fixed, passes.per_row)]
        if times.rate is None or not chosen:
            return chosen
        seconds, total = passes.seconds(len(chosen)), sum(worth[branch] for branch in chosen)
        late = min(seconds + elapsed - times.verify.seconds(1 + num_drafted), seconds / num_parts)
        return chosen if is_worth_its_time(total, late, times.rate) else []

    def is_worth_finishing(self, branches: Branches, branch: int, num_rows: int, share_done: float) -> bool:
        """Whether a pass over `num_rows` rows that the verdict interrupted should end, for the branch that is asked
        for now. What is ready is served as it is, but without its first token a branch is none.
        """
        if self._service == "full":
            return True
        if branches.cache.lengths[branch] > 0:
            return False
        if self._service == "ready" or self.times.rate is None:
            return True
        seconds = self.times.branch_pass.seconds(num_rows) * (1.0 - share_done)
        return self._next_token(branches, branch) > self.times.rate * (seconds + self.times.row_seconds)

    def _worth(self, branches: Branches, branch: int) -> float:
        """What the branch's next token is worth, in tokens: see deepening.py."""
        return branches.chances[branch] * self._next_token(branches, branch)

    def _next_token(self, branches: Branches, branch: int) -> float:
        """Probability that a branch's next token is accepted, with all before it, once its outcome has come."""
        reached = math.prod(self.confidence.acceptance(q) for q in branches.q_of(branch))
        return reached * self.times.acceptance("hit")

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
