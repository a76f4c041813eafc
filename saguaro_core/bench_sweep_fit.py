"""The power law of bonus tokens' ranks, fitted to measured rounds, and the hit rates that it predicts (Theorem 12).

A round's cache shows where its real outcome was: at a place among the candidates of its acceptance length, or beyond
them. From that a and r follow for each cache state, as the draft estimates them while it runs, but pooled over runs.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from statistics import fmean

from saguaro_core.bench_measure import Measurement
from saguaro_core.events import RoundEvent
from saguaro_core.fan_out import CacheState, OutcomeEstimate, acceptance_probabilities

STATES: tuple[CacheState, ...] = ("hit", "miss")
Fit = Mapping[CacheState, OutcomeEstimate]


def fit(runs: Iterable[Measurement]) -> dict[CacheState, OutcomeEstimate]:
    """a and r for speculations that were found in the cache, and for those that were not."""
    estimates: dict[CacheState, OutcomeEstimate] = {state: OutcomeEstimate() for state in STATES}
    for verified, looked_up in _lookups(runs):
        observe(estimates[state_of(verified)], verified, looked_up)
    return estimates


def fit_together(runs: Iterable[Measurement]) -> OutcomeEstimate:
    """a and r without telling the states apart."""
    estimate = OutcomeEstimate()
    for verified, looked_up in _lookups(runs):
        observe(estimate, verified, looked_up)
    return estimate


def observe(estimate: OutcomeEstimate, verified: RoundEvent, looked_up: RoundEvent) -> None:
    """Count the outcome of `verified`, which was looked up in the cache that `looked_up` describes."""
    prepared = next((p.token_ids for p in looked_up.prepared if p.accepted == verified.accepted), ())
    rank = prepared.index(verified.bonus_token_id) + 1 if verified.bonus_token_id in prepared else None
    estimate.observe(verified.drafted, verified.accepted, rank, len(prepared))


def state_of(verified: RoundEvent) -> CacheState:
    """How the round's own speculation was found."""
    return "hit" if verified.cache == "hit" else "miss"


def _lookups(runs: Iterable[Measurement]) -> Iterator[tuple[RoundEvent, RoundEvent]]:
    """Every round with the one after it, in which its outcome was looked up."""
    for run in runs:
        yield from pairwise(run.rounds)


def hit_rate_after(runs: Iterable[Measurement], state: CacheState) -> float | None:
    """The measured share of hits among the rounds that follow one in `state`."""
    hits = [after.cache == "hit" for before, after in _lookups(runs) if state_of(before) == state]
    return fmean(hits) if hits else None


def predicted_hit_rate_after(fan_out: tuple[int, ...], estimate: OutcomeEstimate) -> float:
    """The share of outcomes that a cache of this shape holds, by the power law: P(rank > F) = (F + 1)^-r."""
    lengths = acceptance_probabilities(estimate.acceptance, len(fan_out) - 1)
    r = estimate.power_law_r
    return math.fsum(p * (1.0 - math.pow(count + 1, -r)) for p, count in zip(lengths, fan_out, strict=True))


def predicted_hit_rate(shape: Callable[[CacheState], tuple[int, ...]], fitted: Fit) -> float:
    """The hit rate of a long answer: what stays the same from round to round between both states."""
    after_hit, after_miss = (predicted_hit_rate_after(shape(state), fitted[state]) for state in STATES)
    return after_miss / (1.0 - after_hit + after_miss)
