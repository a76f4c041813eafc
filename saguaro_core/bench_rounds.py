"""What the rounds of many runs say together: waits after a hit and after a miss, and times by the number of rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from saguaro_core.bench_measure import Measurement
from saguaro_core.events import CacheOutcome, RoundEvent

WAIT_MS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFigures:
    """Pooled over all rounds of a column; None where undefined.

    tokens_after_* are tokens per round, bonus included. late_hit_rate is the share of the hit rounds in which the
    target waited more than WAIT_MS. mean_verify_ms_by_rows maps the rows of a verification (1 + drafted) to its time.
    full_build_ms is the draft's work on a cache that was complete before the verdict came; full_build_rate is the
    share of such caches. fallback_kinds counts what served the misses.
    """

    num_rounds: int
    tokens_after_hit: float | None
    tokens_after_miss: float | None
    median_wait_ms_hit: float | None
    median_wait_ms_miss: float | None
    late_hit_rate: float | None
    mean_round_ms: float | None
    mean_verify_ms_by_rows: dict[int, float]
    full_build_ms: float | None
    full_build_rate: float | None
    fallback_kinds: dict[str, int]


def summarise_rounds(runs: Sequence[Measurement]) -> RoundFigures:
    """The figures of one column."""
    rounds = [event for run in runs for event in run.rounds]
    hit_waits, miss_waits = _waits(rounds, "hit"), _waits(rounds, "miss")
    built = [build for run in runs for build in _builds(run)]
    full = [seconds for seconds, is_full in built if is_full]
    kinds = [event.fallback for event in rounds if event.cache == "miss" and event.fallback is not None]
    return RoundFigures(
        num_rounds=len(rounds),
        tokens_after_hit=_mean(event.accepted + 1 for event in rounds if event.cache == "hit"),
        tokens_after_miss=_mean(event.accepted + 1 for event in rounds if event.cache == "miss"),
        median_wait_ms_hit=median(hit_waits) if hit_waits else None,
        median_wait_ms_miss=median(miss_waits) if miss_waits else None,
        late_hit_rate=_mean(wait > WAIT_MS for wait in hit_waits),
        mean_round_ms=_mean(event.verify_ms + event.wait_ms for event in rounds),
        mean_verify_ms_by_rows=_by_rows(rounds),
        full_build_ms=None if not full else 1000.0 * fmean(full),
        full_build_rate=len(full) / len(built) if built else None,
        fallback_kinds={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
    )


def _waits(rounds: Iterable[RoundEvent], cache: CacheOutcome) -> list[float]:
    return [event.wait_ms for event in rounds if event.cache == cache]


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None


def _by_rows(rounds: Iterable[RoundEvent]) -> dict[int, float]:
    times: dict[int, list[float]] = {}
    for event in rounds:
        times.setdefault(1 + event.drafted, []).append(event.verify_ms)
    return {rows: fmean(times[rows]) for rows in sorted(times)}


def _builds(run: Measurement) -> list[tuple[float, bool]]:
    """The build time of every round that has any, and whether it was over before the round's verification was.

    A round's cache is built in one stretch or in several, which all carry its index.
    """
    verdicts = {span.round_index: span.end for span in run.spans if (span.lane, span.kind) == ("target", "verify")}
    built: dict[int, list[tuple[float, float]]] = {}
    for span in run.spans:
        if (span.lane, span.kind) == ("draft", "build") and span.round_index in verdicts:
            built.setdefault(span.round_index, []).append((span.start, span.end))  # type: ignore[arg-type]
    return [
        (sum(end - start for start, end in stretches), max(end for _, end in stretches) < verdicts[index])
        for index, stretches in built.items()
    ]
