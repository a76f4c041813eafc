"""From measurements to the benchmark's figures: pure functions, one report, one JSON form.

Speeds and ratios are medians over prompts, a prompt's repeats being reduced to their median first; rates are pooled
over all rounds; times are means over runs. A ratio is taken between paired runs only.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, quantiles
from typing import Any

from saguaro_core.answers import first_difference
from saguaro_core.bench_measure import AR_ALL_CORES, Measurement
from saguaro_core.bench_rounds import RoundFigures, summarise_rounds
from saguaro_core.prompts import BenchPrompt
from saguaro_core.run_figures import RunFigures
from saguaro_core.theory import predict

RATIOS: Mapping[str, tuple[str, str]] = {
    "ssd_over_ar": ("ssd", "ar"),
    "ssd_over_sd": ("ssd", "sd"),
    "sd_over_ar": ("sd", "ar"),
}
# Only where that column ran.
RATIOS_ALL_CORES: Mapping[str, tuple[str, str]] = {
    "ssd_over_ar_all_cores": ("ssd", AR_ALL_CORES),
    "sd_over_ar_all_cores": ("sd", AR_ALL_CORES),
    "ar_over_ar_all_cores": ("ar", AR_ALL_CORES),
}
Pair = dict[str, Measurement]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeSummary:
    """One column over all its runs; None where undefined.

    mean_acceptance_length is over the rounds with drafted tokens, tokens_per_round over all, plain ones too.
    """

    num_runs: int
    num_tokens: int
    decode_tokens_per_second: float | None
    tokens_per_second_per_device: float | None
    time_to_first_token: float | None
    draft_acceptance_rate: float | None
    cache_hit_rate: float | None
    mean_acceptance_length: float | None
    tokens_per_round: float | None
    mean_verify_ms: float | None
    mean_step_ms: float | None
    mean_build_ms: float | None
    mean_wait_ms: float | None
    mean_fallback_ms: float | None
    build_overlap: float | None
    rounds: RoundFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioSummary:
    """A speed ratio over prompts: its median and quartiles, the prediction's median, and how many prompts count."""

    median: float | None
    quartiles: tuple[float, float] | None
    predicted: float | None
    num_prompts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where two columns' answers to one prompt part; a token id is None where an answer has ended."""

    prompt: int
    repeat: int
    modes: tuple[str, str]
    index: int
    token_ids: tuple[int | None, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """Everything that the table and the JSON file show. `same_tokens` is None when only one column ran."""

    modes: Mapping[str, ModeSummary]
    ratios: Mapping[str, RatioSummary]
    same_tokens: bool | None
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    runs: tuple[Mapping[str, Any], ...]

    def to_json(self, details: Mapping[str, Any]) -> dict[str, Any]:
        """Plain data for --json; `details` says what was run and on what."""
        return {
            "modes": {mode: asdict(summary) for mode, summary in self.modes.items()},
            "ratios": {name: ratio.median for name, ratio in self.ratios.items()},
            "same_tokens": self.same_tokens,
            "predicted_ratios": {name: ratio.predicted for name, ratio in self.ratios.items()},
            "ratio_quartiles": {name: ratio.quartiles for name, ratio in self.ratios.items()},
            "ratio_num_prompts": {name: ratio.num_prompts for name, ratio in self.ratios.items()},
            "differences": [asdict(difference) for difference in self.differences],
            "notes": list(self.notes),
            **details,
            "runs": list(self.runs),
        }


def summarise(measurements: Sequence[Measurement], prompts: Sequence[BenchPrompt]) -> BenchReport:
    """Reduce the runs of a plan to its report."""
    columns = tuple(dict.fromkeys(m.column for m in measurements))
    ratios = {**RATIOS, **RATIOS_ALL_CORES} if AR_ALL_CORES in columns else RATIOS
    pairs = _pairs(measurements)
    differences = tuple(d for pair in pairs for d in _differences(pair))
    return BenchReport(
        modes={column: summarise_column([m for m in measurements if m.column == column]) for column in columns},
        ratios={name: _summarise_ratio(*sides, pairs) for name, sides in ratios.items()},
        same_tokens=not differences if len(columns) > 1 else None,
        differences=differences,
        notes=tuple(note for m in measurements for note in _notes(m)),
        runs=tuple(_run_details(m, prompts[m.prompt]) for m in measurements),
    )


def _pairs(measurements: Iterable[Measurement]) -> list[Pair]:
    """The runs that belong together: one prompt, one repeat, every column."""
    pairs: dict[tuple[int, int], Pair] = {}
    for m in measurements:
        pairs.setdefault((m.prompt, m.repeat), {})[m.column] = m
    return list(pairs.values())


def summarise_column(runs: Sequence[Measurement]) -> ModeSummary:
    """One column's figures over all its runs."""
    figures = [m.figures for m in runs]
    num_hits = sum(f.num_cache_hits for f in figures)
    num_steps = sum(f.num_spec_steps for f in figures)
    num_accepted = sum(f.num_accepted_draft_tokens for f in figures)
    # Its one device is as large as the two of the others.
    is_all_cores = any(m.column == AR_ALL_CORES for m in runs)

    def over_prompts(get: Callable[[RunFigures], float | None]) -> float | None:
        return _median_over_prompts((m.prompt, get(m.figures)) for m in runs)

    def mean(get: Callable[[RunFigures], float | None]) -> float | None:
        values = [value for f in figures if (value := get(f)) is not None]
        return fmean(values) if values else None

    return ModeSummary(
        num_runs=len(runs),
        num_tokens=sum(f.num_tokens for f in figures),
        decode_tokens_per_second=over_prompts(lambda f: f.decode_tokens_per_second),
        tokens_per_second_per_device=None if is_all_cores else over_prompts(lambda f: f.tokens_per_second_per_device),
        time_to_first_token=over_prompts(lambda f: f.time_to_first_token),
        draft_acceptance_rate=_share(num_accepted, sum(f.num_draft_tokens for f in figures)),
        cache_hit_rate=_share(num_hits, num_hits + sum(f.num_cache_misses for f in figures)),
        mean_acceptance_length=_share(num_steps + num_accepted, num_steps),
        tokens_per_round=_share(sum(f.num_tokens for f in figures), sum(f.num_rounds for f in figures)),
        mean_verify_ms=mean(lambda f: f.mean_verify_ms),
        mean_step_ms=mean(lambda f: f.mean_step_ms),
        mean_build_ms=mean(lambda f: f.mean_build_ms),
        mean_wait_ms=mean(lambda f: f.mean_wait_ms),
        mean_fallback_ms=mean(lambda f: f.mean_fallback_ms),
        build_overlap=mean(lambda f: f.build_overlap),
        rounds=summarise_rounds(runs),
    )


def _summarise_ratio(upper: str, lower: str, pairs: Sequence[Pair]) -> RatioSummary:
    paired = [pair for pair in pairs if upper in pair and lower in pair]
    per_prompt = _per_prompt((pair[upper].prompt, _measured_ratio(pair[upper], pair[lower])) for pair in paired)
    predicted = _median_over_prompts((pair[upper].prompt, _predicted_ratio(upper, lower, pair)) for pair in paired)
    return RatioSummary(
        median=median(per_prompt) if per_prompt else None,
        quartiles=_quartiles(per_prompt),
        predicted=predicted,
        num_prompts=len(per_prompt),
    )


def _measured_ratio(upper: Measurement, lower: Measurement) -> float | None:
    speeds = upper.figures.decode_tokens_per_second, lower.figures.decode_tokens_per_second
    return speeds[0] / speeds[1] if speeds[0] is not None and speeds[1] else None


def _predicted_ratio(upper: str, lower: str, pair: Pair) -> float | None:
    """The speed model, fed with this pair's own acceptance, hit rate and times."""
    base = lower if lower != "sd" else "ar"
    ar, sd = (pair[column].figures if column in pair else None for column in (base, "sd"))
    predicted = predict(pair[upper].figures, ar=ar, sd=sd)
    value: float | None = getattr(predicted, f"{upper}_over_{'ar' if lower == AR_ALL_CORES else lower}", None)
    return value


def _per_prompt(values: Iterable[tuple[int, float | None]]) -> list[float]:
    """One value per prompt, the median of its repeats; prompts without any are left out."""
    by_prompt: dict[int, list[float]] = {}
    for prompt, value in values:
        if value is not None:
            by_prompt.setdefault(prompt, []).append(value)
    return [median(repeats) for repeats in by_prompt.values()]


def _median_over_prompts(values: Iterable[tuple[int, float | None]]) -> float | None:
    per_prompt = _per_prompt(values)
    return median(per_prompt) if per_prompt else None


def _quartiles(values: Sequence[float]) -> tuple[float, float] | None:
    if len(values) < 2:
        return None
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _differences(pair: Pair) -> list[Difference]:
    """Each column against the first one that ran."""
    first, *others = pair.values()
    return [d for other in others if (d := _difference(first, other)) is not None]


def _difference(first: Measurement, other: Measurement) -> Difference | None:
    ids, other_ids = first.finished.token_ids, other.finished.token_ids
    index = first_difference(ids, other_ids)
    if index is None:
        return None
    return Difference(
        prompt=first.prompt,
        repeat=first.repeat,
        modes=(first.column, other.column),
        index=index,
        token_ids=(_at(ids, index), _at(other_ids, index)),
    )


def _at(ids: Sequence[int], index: int) -> int | None:
    return ids[index] if index < len(ids) else None


def _notes(m: Measurement) -> list[str]:
    """What the reader must know before believing a run: the engine's notices, and speculation that never ran."""
    name = f"prompt {m.prompt + 1}, {m.column}"
    notes = [f"{name}: {notice}" for notice in m.notices]
    if m.mode != "ar" and m.figures.num_spec_steps == 0 and m.figures.num_tokens > 1:
        notes.append(f"{name}: nothing was drafted, so this run decoded as AR does.")
    return notes


def _run_details(m: Measurement, prompt: BenchPrompt) -> dict[str, Any]:
    return {
        "prompt": m.prompt,
        "kind": prompt.kind,
        "repeat": m.repeat,
        "mode": m.column,
        "stop_reason": m.finished.stop_reason,
        "token_ids": m.finished.token_ids,
        "figures": asdict(m.figures),
    }
