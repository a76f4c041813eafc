"""The shape of the speculation cache: how many bonus tokens F_k to prepare for each acceptance length k.

Theorem 12 of arXiv 2603.03251: if a token is accepted with probability a and the miss rate at one position falls as
F^-r, the best F_k under a budget B is proportional to P(k)^(1/(1+r)), P(k) being the probability of acceptance length
k.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from saguaro_core.config import SpeculationConfig

CacheState = Literal["hit", "miss"]


def acceptance_probabilities(acceptance: float, lookahead: int) -> list[float]:
    """P(k) for k = 0..K: a^k (1 - a) below K, a^K at K."""
    return length_probabilities([acceptance] * lookahead)


def uniform_fan_out(lookahead: int, budget: int) -> tuple[int, ...]:
    """The budget spread evenly over k = 0..K."""
    return round_to_budget([1.0] * (lookahead + 1), budget)


def geometric_fan_out(lookahead: int, budget: int, acceptance: float, power_law_r: float) -> tuple[int, ...]:
    """Theorem 12's shape: decays with k and jumps at k = K."""
    exponent = 1.0 / (1.0 + power_law_r)
    return round_to_budget([p**exponent for p in acceptance_probabilities(acceptance, lookahead)], budget)


def confident_fan_out(reach: Sequence[float], budget: int, power_law_r: float) -> tuple[int, ...]:
    """Theorem 12 without its one acceptance for all: reach[k] is P(k), and the budget takes the likeliest outcomes.

    The j-th best bonus token at k comes with probability P(k) (j^-r - (j + 1)^-r).
    """
    shape, best = [0] * len(reach), [p * rank_share(1, power_law_r) for p in reach]
    for _ in range(budget):
        k = max(range(len(best)), key=best.__getitem__)
        shape[k] += 1
        best[k] = reach[k] * rank_share(shape[k] + 1, power_law_r)
    return tuple(shape)


def rank_share(rank: int, power_law_r: float) -> float:
    """Probability that the bonus token is the candidate of this rank, from 1, under a miss rate of F^-r."""
    return float(rank**-power_law_r - (rank + 1) ** -power_law_r)


def length_probabilities(acceptances: Sequence[float]) -> list[float]:
    """P(k) for k = 0..K when token k + 1 is accepted, if those before it are, with probability acceptances[k]."""
    reached, found = 1.0, []
    for acceptance in acceptances:
        found.append(reached * (1.0 - acceptance))
        reached *= acceptance
    return [*found, reached]


def round_to_budget(weights: list[float], budget: int) -> tuple[int, ...]:
    """Whole numbers proportional to the weights that sum to the budget exactly (largest remainders, earlier k
    first).
    """
    total = sum(weights)
    exact = [weight / total * budget for weight in weights]
    counts = [math.floor(x) for x in exact]
    by_remainder = sorted(range(len(exact)), key=lambda k: (counts[k] - exact[k], k))
    for k in by_remainder[: budget - sum(counts)]:
        counts[k] += 1
    return tuple(counts)


@dataclass(slots=True)
class OutcomeEstimate:
    """Online estimates of a and r for one cache state, each with a prior worth a few rounds.

    a is a Beta posterior mean. r is the maximum-likelihood exponent of P(rank > F) = (F + 1)^-r under a Gamma prior,
    from the ranks that the real bonus tokens had among the draft's candidates; a rank beyond those kept counts as
    censored there.
    """

    accepted: float = 4.0
    rejected: float = 4.0
    num_ranked: float = 4.0
    log_ranks: float = 4.0

    @property
    def acceptance(self) -> float:
        """a, kept inside (0, 1)."""
        return self.accepted / (self.accepted + self.rejected)

    @property
    def power_law_r(self) -> float:
        """r, the exponent of the miss rate."""
        return self.num_ranked / self.log_ranks

    def observe(self, drafted: int, accepted: int, rank: int | None, num_kept: int) -> None:
        """Count one round; `rank` is the bonus token's 1-based place among the `num_kept` candidates, None if
        beyond.
        """
        self.accepted += accepted
        self.rejected += accepted < drafted
        if rank is not None:
            self.num_ranked += 1
            # A rank stands for the interval [rank, rank + 1) of the continuous law: its geometric middle.
            self.log_ranks += 0.5 * math.log(rank * (rank + 1))
        elif num_kept > 0:
            self.log_ranks += math.log(num_kept + 1)


@dataclass(slots=True)
class FanOutPlanner:
    """Chooses the shape of each cache from the request's policy and the rounds seen, per cache state."""

    config: SpeculationConfig
    estimates: dict[CacheState, OutcomeEstimate] = field(
        default_factory=lambda: {"hit": OutcomeEstimate(), "miss": OutcomeEstimate()}
    )

    def shape(self, drafted: int, state: CacheState) -> tuple[int, ...]:
        """F_k for k = 0..drafted when the speculation under verification came from `state`.

        `confident` looks at the drafted tokens, which shape_for knows; where only their number is known its shape is
        the geometric one.
        """
        config = self.config
        if config.fan_out == "list":
            full = config.fan_out_list
            # A shorter speculation ends at `drafted`, where the list's last entry (all accepted) belongs.
            return full[:drafted] + full[-1:]
        if config.fan_out == "uniform":
            return uniform_fan_out(drafted, config.budget)
        return geometric_fan_out(drafted, config.budget, *self.parameters(state))

    def shape_for(self, acceptances: Sequence[float], state: CacheState) -> tuple[int, ...]:
        """The same for drafted tokens of which each is accepted, after those before it, with its own probability."""
        if self.config.fan_out != "confident":
            return self.shape(len(acceptances), state)
        _, power_law_r = self.parameters(state)
        return confident_fan_out(self._lengths(acceptances), self.config.budget, power_law_r)

    def _lengths(self, acceptances: Sequence[float]) -> list[float]:
        """P(k), by the user's a where that is fixed."""
        fixed = self.config.acceptance
        return length_probabilities(acceptances if fixed is None else [fixed] * len(acceptances))

    def parameters(self, state: CacheState) -> tuple[float, float]:
        """a and r as the shape uses them: fixed by the user, or as the rounds so far say."""
        config, estimate = self.config, self.estimates[state]
        acceptance = config.acceptance if config.acceptance is not None else estimate.acceptance
        power_law_r = config.power_law_r if config.power_law_r is not None else estimate.power_law_r
        return acceptance, power_law_r

    def outcome_probabilities(
        self, fan_out: Sequence[int], acceptances: Sequence[float], state: CacheState
    ) -> list[list[float]]:
        """For each acceptance length k of a speculation from `state`, what its F_k best candidates should come with."""
        _, power_law_r = self.parameters(state)
        return [
            [p * rank_share(rank, power_law_r) for rank in range(1, count + 1)]
            for p, count in zip(self._lengths(acceptances), fan_out, strict=True)
        ]

    def observe(self, state: CacheState, drafted: int, accepted: int, rank: int | None, num_kept: int) -> None:
        """Learn from a round that verified `drafted` tokens found in `state`."""
        self.estimates[state].observe(drafted, accepted, rank, num_kept)
