"""From measured batches to figures: speed of the whole batch and of each sequence, and where the fast backup wins.

Speed is read where all sequences of a batch still run: from the end of the first round to the end of the last one that
all of them had. A batch's rounds are common, so round i of one sequence is round i of every other.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any, Literal

from saguaro_core.events import Event, Notice, RoundEvent, RunFinished
from saguaro_core.theory import Backup, critical_batch_size, ssd_speed

Column = Literal["ar", "sd", "ssd_neural", "ssd_fast"]


@dataclass(slots=True)
class ObservedRow:
    """What one sequence emitted, as far as the figures need it."""

    rounds: list[RoundEvent] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    finished: RunFinished | None = None

    def take(self, event: Event) -> None:
        """Keep an event."""
        match event:
            case RoundEvent():
                self.rounds.append(event)
            case Notice():
                self.notices.append(event.message)
            case RunFinished():
                self.finished = event


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRun:
    """One finished batch: `group` numbers the prompts, which are the same for every column of a size."""

    column: Column
    size: int
    group: int
    rows: tuple[ObservedRow, ...]

    @property
    def common(self) -> list[tuple[RoundEvent, ...]]:
        """The rounds that all sequences had, each as one event of every sequence, after the first one."""
        return list(zip(*(row.rounds for row in self.rows), strict=False))[1:]

    @property
    def seconds(self) -> float:
        """How long these rounds took."""
        return fmean(_end(row.rounds[len(self.common)]) - _end(row.rounds[0]) for row in self.rows)

    @property
    def tokens(self) -> tuple[int, ...]:
        """How many tokens they gave to each sequence."""
        return tuple(sum(events) for events in zip(*(_committed(together) for together in self.common), strict=True))


def _end(event: RoundEvent) -> float:
    return event.start + event.verify_ms / 1e3


def _committed(together: tuple[RoundEvent, ...]) -> list[int]:
    return [event.num_committed for event in together]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFigures:
    """One column at one batch size; medians over batches, rates pooled over rounds; None where undefined.

    all_hit_rate is the share of rounds in which no sequence missed; predicted_all_hit_rate is p^b, what it would be if
    sequences missed independently. tokens_after_miss excludes the compulsory first round.
    """

    size: int
    column: Column
    num_batches: int
    tokens_per_second: float | None
    tokens_per_second_each: float | None
    round_ms: float | None
    wait_ms: float | None
    verify_ms: float | None
    cache_hit_rate: float | None
    all_hit_rate: float | None
    predicted_all_hit_rate: float | None
    tokens_after_hit: float | None
    tokens_after_miss: float | None
    build_ms: float | None
    fallback_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeReport:
    """One batch size: its columns, throughput ratios of paired batches, and what Theorem 17 says of fast and neural."""

    size: int
    columns: dict[Column, BatchFigures]
    ratios: dict[str, float | None]
    predicted_fast_over_neural: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """All sizes. b* is the smallest batch at which the fast backup wins: as measured among the sizes, and as Theorem
    17 has it from the figures of the smallest size. None: it never does.
    """

    sizes: list[SizeReport]
    measured_critical_batch: int | None
    predicted_critical_batch: int | None
    same_tokens: bool
    notes: list[str]


RATIOS: dict[str, tuple[Column, Column]] = {
    "sd_over_ar": ("sd", "ar"),
    "ssd_neural_over_ar": ("ssd_neural", "ar"),
    "ssd_fast_over_ar": ("ssd_fast", "ar"),
    "ssd_neural_over_sd": ("ssd_neural", "sd"),
    "ssd_fast_over_sd": ("ssd_fast", "sd"),
    "ssd_fast_over_ssd_neural": ("ssd_fast", "ssd_neural"),
}


def summarise_batches(runs: Sequence[BatchRun]) -> BatchReport:
    """The figures of all batches, which hold every column for every size."""
    sizes = [
        _size_report(size, [run for run in runs if run.size == size]) for size in dict.fromkeys(r.size for r in runs)
    ]
    wins = [report.size for report in sizes if (report.ratios["ssd_fast_over_ssd_neural"] or 0.0) > 1.0]
    smallest = min(sizes, key=lambda report: report.size)
    return BatchReport(
        sizes=sizes,
        measured_critical_batch=min(wins, default=None),
        predicted_critical_batch=_predict_critical_batch(smallest),
        same_tokens=_has_same_tokens(runs),
        notes=sorted({notice for run in runs for row in run.rows for notice in row.notices}),
    )


def _size_report(size: int, runs: list[BatchRun]) -> SizeReport:
    by_column = {
        column: [run for run in runs if run.column == column] for column in dict.fromkeys(r.column for r in runs)
    }
    columns = {column: _figures(size, column, own) for column, own in by_column.items()}
    ratios = {name: _paired_ratio(by_column[over], by_column[base]) for name, (over, base) in RATIOS.items()}
    return SizeReport(
        size=size, columns=columns, ratios=ratios, predicted_fast_over_neural=_predict_ratio(size, columns)
    )


def _speed(run: BatchRun) -> float | None:
    return sum(run.tokens) / run.seconds if run.common and run.seconds > 0 else None


def _paired_ratio(over: list[BatchRun], base: list[BatchRun]) -> float | None:
    """Median ratio of throughput over groups of the same prompts."""
    speeds = {run.group: _speed(run) for run in base}
    return _median(
        speed / base_speed for run in over if (speed := _speed(run)) and (base_speed := speeds.get(run.group))
    )


def _figures(size: int, column: Column, runs: list[BatchRun]) -> BatchFigures:
    timed = [run for run in runs if _speed(run) is not None]
    rounds = [together for run in timed for together in run.common]
    events = [event for together in rounds for event in together]
    cached = [event for event in events if event.cache is not None]
    finished = [row.finished.figures for run in runs for row in run.rows if row.finished is not None]
    hit_rate = _mean(float(event.cache == "hit") for event in cached)
    return BatchFigures(
        size=size,
        column=column,
        num_batches=len(runs),
        tokens_per_second=_median(_speed(run) for run in timed),
        tokens_per_second_each=_median(count / run.seconds for run in timed for count in run.tokens),
        round_ms=_median(1e3 * run.seconds / len(run.common) for run in timed),
        wait_ms=_mean(max(event.wait_ms for event in together) for together in rounds),
        verify_ms=_mean(event.verify_ms for event in events),
        cache_hit_rate=hit_rate,
        all_hit_rate=_mean(float(all(e.cache == "hit" for e in together)) for together in rounds) if cached else None,
        predicted_all_hit_rate=None if hit_rate is None else hit_rate**size,
        tokens_after_hit=_mean(event.accepted + 1 for event in cached if event.cache == "hit"),
        tokens_after_miss=_mean(event.accepted + 1 for event in cached if event.cache == "miss"),
        build_ms=_mean(figures.mean_build_ms for figures in finished),
        fallback_ms=_mean(event.draft_ms for event in cached if event.cache == "miss"),
    )


def _backup(figures: BatchFigures, unit: float) -> Backup:
    """The backup that a column used, in units of one verification."""
    return Backup(tokens_per_round=figures.tokens_after_miss or 1.0, time=(figures.fallback_ms or 0.0) / unit)


def _predict_ratio(size: int, columns: dict[Column, BatchFigures]) -> float | None:
    """Theorem 17 at this size, from this size's own figures: speed with the fast backup over that with the neural."""
    neural, fast = columns["ssd_neural"], columns["ssd_fast"]
    unit, hit_rate = neural.verify_ms, neural.cache_hit_rate
    if not unit or hit_rate is None:
        return None
    build, after_hit = (neural.build_ms or 0.0) / unit, neural.tokens_after_hit or 1.0
    speeds = [
        ssd_speed(hit_rate, after_hit, _backup(column, unit), build, batch_size=size) for column in (fast, neural)
    ]
    return speeds[0] / speeds[1]


def _predict_critical_batch(report: SizeReport) -> int | None:
    neural, fast = report.columns["ssd_neural"], report.columns["ssd_fast"]
    unit, hit_rate = neural.verify_ms, neural.cache_hit_rate
    if not unit or hit_rate is None:
        return None
    return critical_batch_size(
        hit_rate,
        neural.tokens_after_hit or 1.0,
        _backup(neural, unit),
        _backup(fast, unit),
        (neural.build_ms or 0.0) / unit,
    )


def _has_same_tokens(runs: Sequence[BatchRun]) -> bool:
    """Whether every sequence says the same in all columns."""
    said: dict[tuple[int, int, int], set[tuple[int, ...]]] = {}
    for run in runs:
        for index, row in enumerate(run.rows):
            if row.finished is not None:
                said.setdefault((run.size, run.group, index), set()).add(row.finished.token_ids)
    return all(len(answers) == 1 for answers in said.values())


def _median(values: Iterable[float | None]) -> float | None:
    return _reduce(median, values)


def _mean(values: Iterable[float | None]) -> float | None:
    return _reduce(fmean, values)


def _reduce(reduction: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return reduction(known) if known else None


def batches_to_json(report: BatchReport) -> dict[str, Any]:
    """The report as plain data."""
    return {
        "batches": [asdict(size) for size in report.sizes],
        "critical_batch_size": {
            "measured": report.measured_critical_batch,
            "predicted": report.predicted_critical_batch,
        },
        "same_tokens": report.same_tokens,
        "notes": report.notes,
    }
