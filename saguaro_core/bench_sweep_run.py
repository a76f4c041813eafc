"""What a sweep is made of: points that differ in one setting, run in turn for each prompt, and a table of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from saguaro_core.bench_measure import NUM_WARM_UP_TOKENS, BenchPlan, DecodingEngine, Measurement, run
from saguaro_core.bench_report import ModeSummary, summarise_column
from saguaro_core.config import Mode, SamplingParams, SpeculationConfig
from saguaro_core.prompts import WARM_UP, BenchPrompt

Runs = dict[str, list[Measurement]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One setting to measure; `name` tells it from the others."""

    name: str
    speculation: SpeculationConfig
    mode: Mode = "ssd"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """What all points share."""

    prompts: tuple[BenchPrompt, ...]
    sampling: SamplingParams
    speculation: SpeculationConfig

    def of(self, point: SweepPoint) -> BenchPlan:
        """The point as a plan of the benchmark."""
        return BenchPlan(
            modes=(point.mode,),
            prompts=self.prompts,
            repeats=1,
            sampling=self.sampling,
            speculation=point.speculation,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """The table, and what the JSON file says beside the points' own figures."""

    lines: Sequence[str]
    data: Mapping[str, Any] = field(default_factory=dict)


class Sweep(Protocol):
    """One kind of sweep. Points come in stages, because a stage may depend on what the one before measured."""

    def check(self, plan: SweepPlan) -> None:
        """Raise InvalidRequest with the reason where the sweep means nothing."""
        ...

    def stages(self, plan: SweepPlan, runs: Runs) -> Iterator[list[SweepPoint]]:
        """The points of each stage; `runs` then holds those of the stages before."""
        ...

    def report(self, plan: SweepPlan, runs: Runs) -> SweepReport:
        """What the runs show, however many there are."""
        ...


def run_points(
    engine: DecodingEngine,
    plan: SweepPlan,
    points: Sequence[SweepPoint],
    runs: Runs,
    on_run: Callable[[SweepPoint, Measurement], None],
) -> None:
    """Run every prompt at all points in turn, so that points are paired; `runs` is filled as it goes."""
    for index, prompt in enumerate(plan.prompts):
        for point in points:
            request = plan.of(point).request(point.mode, prompt)
            observed = run(engine, request, f"prompt {index + 1} at {point.name}")
            measurement = observed.measurement(point.mode, point.name, index, 0)
            runs.setdefault(point.name, []).append(measurement)
            on_run(point, measurement)


def warm_up(engine: DecodingEngine, plan: SweepPlan, modes: Iterable[Mode]) -> None:
    """One short run in each mode that nobody looks at."""
    for mode in modes:
        point = SweepPoint(name="the warm-up", speculation=plan.speculation, mode=mode)
        cap = min(NUM_WARM_UP_TOKENS, plan.sampling.max_new_tokens)
        run(engine, plan.of(point).request(mode, WARM_UP, cap), f"the warm-up in mode {mode}")


def summaries(runs: Runs) -> dict[str, ModeSummary]:
    """The figures of every point that has runs."""
    return {name: summarise_column(measurements) for name, measurements in runs.items()}


def points_to_json(runs: Runs) -> list[dict[str, Any]]:
    """Every point's figures as plain data."""
    return [{"name": name, **asdict(summary)} for name, summary in summaries(runs).items()]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows of cells under their heads; the first column is text, the others numbers."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
