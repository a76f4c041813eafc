"""The sweep of the cache: hit rate against budget for four policies, measured and, where the shape is the same in every
round, as the fitted power law predicts.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

from saguaro_core.bench_measure import Measurement
from saguaro_core.bench_report import summarise_column
from saguaro_core.bench_sweep_fit import STATES, Fit, fit, fit_together, hit_rate_after, predicted_hit_rate
from saguaro_core.bench_sweep_run import Runs, SweepPlan, SweepPoint, SweepReport, table
from saguaro_core.bench_table import number, percent
from saguaro_core.config import FanOutPolicy
from saguaro_core.fan_out import CacheState, geometric_fan_out, uniform_fan_out

BUDGETS = (2, 4, 8, 12, 16, 24)
POLICIES: tuple[FanOutPolicy, ...] = ("uniform", "geometric", "confident")
_HEAD = (
    "shape",
    "budget",
    "hit rate",
    "predicted",
    "after a hit",
    "after a miss",
    "tokens/speculated round",
    "tokens/s",
)


class FanOutSweep:
    """The policies first; then lists, which are Theorem 12's shapes for what those runs fitted, held fixed."""

    def check(self, plan: SweepPlan) -> None:
        """It means something under all settings."""

    def stages(self, plan: SweepPlan, runs: Runs) -> Iterator[list[SweepPoint]]:
        """Two stages: what needs no fit, and what does."""
        base = plan.speculation
        yield [
            SweepPoint(name=f"{policy} {budget}", speculation=replace(base, fan_out=policy, budget=budget))
            for budget in BUDGETS
            for policy in POLICIES
        ]
        estimate = fit_together(_of_one_shape(runs))
        shapes = [geometric_fan_out(base.lookahead, b, estimate.acceptance, estimate.power_law_r) for b in BUDGETS]
        yield [
            SweepPoint(
                name=f"list {','.join(map(str, shape))}",
                speculation=replace(base, fan_out="list", fan_out_list=shape),
            )
            for shape in shapes
        ]

    def report(self, plan: SweepPlan, runs: Runs) -> SweepReport:
        """One row for each point, then the fit."""
        fitted = fit(_of_one_shape(runs))
        predicted = {name: _predicted(plan, name, fitted) for name in runs}
        rows = [_row(name, runs[name], predicted[name]) for name in runs]
        fits = [_describe(state, fitted) for state in STATES]
        data: dict[str, Any] = {
            "predicted_hit_rates": predicted,
            "hit_rates_after": {name: {s: hit_rate_after(runs[name], s) for s in STATES} for name in runs},
            "fit": {s: {"a": fitted[s].acceptance, "r": fitted[s].power_law_r, **asdict(fitted[s])} for s in STATES},
        }
        return SweepReport(lines=[*table(_HEAD, rows), "", *fits], data=data)


def _of_one_shape(runs: Runs) -> list[Measurement]:
    """What the power law is fitted to: a confident cache chooses its counts by the tokens' own probabilities."""
    return [run for name, measured in runs.items() if name.split()[0] != "confident" for run in measured]


def _predicted(plan: SweepPlan, name: str, fitted: Fit) -> float | None:
    """By the power law; None for a confident cache, whose shape is another one in every round."""
    shape = _shape(plan, name, fitted)
    return None if shape is None else predicted_hit_rate(shape, fitted)


def _shape(plan: SweepPlan, name: str, fitted: Fit) -> Callable[[CacheState], tuple[int, ...]] | None:
    """The cache's shape at a point, for a full speculation found in a state; None where it has none of its own."""
    policy, size = name.split()
    if policy == "confident":
        return None
    lookahead = plan.speculation.lookahead
    if policy == "uniform":
        return lambda state: uniform_fan_out(lookahead, int(size))
    if policy == "list":
        return lambda state: tuple(map(int, size.split(",")))
    return lambda state: geometric_fan_out(lookahead, int(size), fitted[state].acceptance, fitted[state].power_law_r)


def _row(name: str, measurements: list[Measurement], predicted: float | None) -> list[str]:
    policy, size = name.split()
    summary = summarise_column(measurements)
    return [
        name if policy == "list" else policy,
        str(sum(map(int, size.split(",")))),
        percent(summary.cache_hit_rate),
        percent(predicted),
        *(percent(hit_rate_after(measurements, state)) for state in STATES),
        number(summary.mean_acceptance_length),
        number(summary.decode_tokens_per_second, 1),
    ]


def _describe(state: CacheState, fitted: Fit) -> str:
    estimate = fitted[state]
    return (
        f"fit after a {state}: a = {estimate.acceptance:.2f}, r = {estimate.power_law_r:.2f} "
        f"(the bonus token is beyond the F best candidates with probability (F + 1)^-r)"
    )
