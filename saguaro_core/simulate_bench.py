"""From a benchmark's JSON file to scenarios, and measured against simulated against predicted.

Every pair of runs (one prompt, one repeat, all modes) becomes scenarios with that pair's own times, acceptance and hit
rate; ratios are then reduced as the benchmark reduces them, to the median over prompts. What is simulated is how the
two devices' work falls in time, from verify and draft times alone: neither the measured waits of SSD nor its speed go
in.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from saguaro_core.config import Mode, SpeculationConfig
from saguaro_core.errors import InvalidRequest
from saguaro_core.run_figures import RunFigures
from saguaro_core.simulate_closed import speed_model
from saguaro_core.simulate_model import Chances, Cost, Plan, Scenario, Times
from saguaro_core.simulate_run import SimResult, simulate
from saguaro_core.theory import acceptance_for

ROUNDS_PER_PAIR = 1000
RATIOS: tuple[tuple[Mode, Mode], ...] = (("sd", "ar"), ("ssd", "ar"), ("ssd", "sd"))
Pair = Mapping[Mode, RunFigures]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What a benchmark's file says: figures by (prompt, repeat) and mode, and how speculation was set."""

    pairs: Mapping[tuple[int, int], Pair]
    speculation: SpeculationConfig

    @property
    def pooled(self) -> Pair:
        """One set of figures per mode: counts summed, all else averaged over the runs."""
        modes = dict.fromkeys(mode for pair in self.pairs.values() for mode in pair)
        return {mode: _pool([pair[mode] for pair in self.pairs.values() if mode in pair]) for mode in modes}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure: measured, simulated, and by Theorem 7; None where the theorem does not say."""

    name: str
    measured: float | None
    simulated: float | None
    predicted: float | None = None


def read_benchmark(path: Path) -> Benchmark:
    """Read what `python -m saguaro_core.bench --json FILE` wrote. Raises ValueError that says what is wrong."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        pairs: dict[tuple[int, int], dict[Mode, RunFigures]] = {}
        for run in data["runs"]:
            figures = msgspec.convert(run["figures"], RunFigures)
            pairs.setdefault((run["prompt"], run["repeat"]), {})[run["mode"]] = figures
        speculation = SpeculationConfig.from_mapping(_known(data["settings"]["speculation"]))
    except (OSError, ValueError, KeyError, TypeError, InvalidRequest) as error:
        raise ValueError(
            f"file {str(path)!r} cannot be used ({error}): write one with python -m saguaro_core.bench --json FILE."
        ) from error
    if not pairs:
        raise ValueError(f"file {str(path)!r} holds no runs: write one with python -m saguaro_core.bench --json FILE.")
    return Benchmark(pairs, speculation)


def _known(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A file of a later version may hold settings that do not matter here."""
    names = {f.name for f in fields(SpeculationConfig)}
    return {name: value for name, value in settings.items() if name in names}


def scenarios(pair: Pair, speculation: SpeculationConfig) -> dict[Mode, Scenario]:
    """A pair's runs as scenarios. A mode whose run never verified, or never drafted, is left out."""
    found: dict[Mode, Scenario] = {}
    for mode, figures in pair.items():
        is_usable = mode == "ar" or (figures.num_spec_steps > 0 and figures.mean_acceptance_length is not None)
        if figures.mean_verify_ms and is_usable and figures.num_tokens > 1:
            found[mode] = _scenario(mode, pair, speculation)
    return found


def _scenario(mode: Mode, pair: Pair, speculation: SpeculationConfig) -> Scenario:
    figures = pair[mode]
    per_round = figures.mean_acceptance_length or 1.0
    plan = Plan(
        lookahead=speculation.lookahead,
        budget=speculation.budget,
        fan_out=speculation.fan_out,
        fan_out_list=speculation.fan_out_list,
        backup="fast" if speculation.fallback == "fast" else "neural",
        num_tokens=max(figures.num_tokens, math.ceil(3 * per_round)),
        num_answers=math.ceil(ROUNDS_PER_PAIR * per_round / figures.num_tokens),
    )
    return Scenario(mode=mode, times=_times(mode, pair, speculation), chances=_chances(figures, speculation), plan=plan)


def _chances(figures: RunFigures, speculation: SpeculationConfig) -> Chances:
    """The acceptances that give the run's own tokens per round; a state that never occurred takes the run's mean."""
    mean = figures.mean_acceptance_length or 1.0

    def acceptance(tokens: float | None) -> tuple[float, ...]:
        return (acceptance_for(max(1.0, mean if tokens is None else tokens), speculation.lookahead),)

    return Chances(
        after_hit=acceptance(figures.mean_acceptance_length_hit),
        after_miss=acceptance(figures.mean_acceptance_length_miss),
        sd=acceptance(None),
        hit_rate=figures.cache_hit_rate or 0.0,
    )


def _times(mode: Mode, pair: Pair, speculation: SpeculationConfig) -> Times:
    figures = pair[mode]
    verify = figures.mean_verify_ms or 0.0
    single = pair["ar"].mean_verify_ms if "ar" in pair else None
    if mode == "ar":
        return Times(verify=Cost(((1, verify),)), draft=Cost(((1, 0.0),)), overhead=_overhead_ms(figures))
    rows = 1 + speculation.lookahead
    return Times(
        verify=Cost(((1, min(single, verify)), (rows, verify)) if single is not None else ((1, verify),)),
        draft=_draft_cost(mode, pair, speculation),
        serve=(figures.mean_fallback_ms or 0.0) if mode == "ssd" and speculation.fallback == "fast" else 0.0,
        overhead=_overhead_ms(figures),
        link=_link_ms(pair),
    )


def _draft_cost(mode: Mode, pair: Pair, speculation: SpeculationConfig) -> Cost:
    """A row costs a step of SD or of the fallback; the budget's rows cost an equal part of what remains of a build."""
    figures = pair[mode]
    step = figures.mean_step_ms
    if mode == "ssd" and figures.mean_fallback_ms is not None and speculation.fallback != "fast":
        step = figures.mean_fallback_ms * figures.num_spec_steps / figures.num_draft_tokens
    if step is None:
        step = (pair["sd"].mean_step_ms if "sd" in pair else None) or 0.0
    if mode == "sd" or speculation.budget == 1 or figures.mean_build_ms is None:
        return Cost(((1, step),))
    return Cost(((1, step), (speculation.budget, max(0.0, figures.mean_build_ms - step) / speculation.lookahead)))


def _overhead_ms(figures: RunFigures) -> float:
    """What a round holds besides verification and wait."""
    round_ms, speed = figures.mean_round_ms, figures.decode_tokens_per_second
    if round_ms is None and speed:
        round_ms = 1e3 * (figures.mean_acceptance_length or 1.0) / speed
    return max(0.0, (round_ms or 0.0) - (figures.mean_verify_ms or 0.0) - (figures.mean_wait_ms or 0.0))


def _link_ms(pair: Pair) -> float:
    """One way, from SD: the part of its rounds' waits, and of the work beside them, in which no draft forward ran."""
    sd = pair.get("sd")
    if sd is None or sd.mean_wait_ms is None or sd.mean_step_ms is None or not sd.num_spec_steps:
        return 0.0
    forwards = sd.mean_step_ms * sd.num_draft_tokens / (sd.num_rounds or sd.num_spec_steps)
    return max(0.0, sd.mean_wait_ms + _overhead_ms(sd) - forwards) / 2


def compare(benchmark: Benchmark, *, seed: int = 0) -> list[Comparison]:
    """Speeds and ratios as medians over prompts, then what explains them as means over runs."""
    keys, simulated, predicted = list(benchmark.pairs), [], []
    for index, key in enumerate(keys):
        found = scenarios(benchmark.pairs[key], benchmark.speculation)
        simulated.append({mode: simulate(s, seed=seed + index) for mode, s in found.items()})
        predicted.append({mode: speed_model(s) for mode, s in found.items()})
    measured = [
        {mode: benchmark.pairs[key][mode].decode_tokens_per_second for mode in simulated[i]}
        for i, key in enumerate(keys)
    ]
    speeds = [{mode: result.tokens_per_second for mode, result in pair.items()} for pair in simulated]

    def over_prompts(get: Callable[[Mapping[Mode, float | None]], float | None], pairs: Sequence[Any]) -> float | None:
        return _median_over_prompts(zip(keys, map(get, pairs), strict=True))

    rows = []
    for mode in [m for m in ("ar", "sd", "ssd") if any(m in pair for pair in simulated)]:
        get = _speed_of(mode)
        rows.append(
            Comparison(f"{mode.upper()}, tokens/s", *(over_prompts(get, p) for p in (measured, speeds, predicted)))
        )
    for fast, slow in RATIOS:
        ratio = _ratio_of(fast, slow)
        values = [over_prompts(ratio, pairs) for pairs in (measured, speeds, predicted)]
        if values[0] is not None:
            rows.append(Comparison(f"{fast.upper()} / {slow.upper()}", *values))
    return rows + _explaining([benchmark.pairs[key] for key in keys], simulated)


def _speed_of(mode: Mode) -> Callable[[Mapping[Mode, float | None]], float | None]:
    return lambda pair: pair.get(mode)


def _ratio_of(fast: Mode, slow: Mode) -> Callable[[Mapping[Mode, float | None]], float | None]:
    def ratio(pair: Mapping[Mode, float | None]) -> float | None:
        above, below = pair.get(fast), pair.get(slow)
        return above / below if above is not None and below else None

    return ratio


def _explaining(pairs: Sequence[Pair], simulated: Sequence[Mapping[Mode, SimResult]]) -> list[Comparison]:
    rows = []
    for mode in ("sd", "ssd"):
        both = [(pair[mode], result[mode]) for pair, result in zip(pairs, simulated, strict=True) if mode in result]
        if both:
            name = mode.upper()
            rows += [
                _means(f"{name}, tokens per round", both, lambda f: f.mean_acceptance_length, _tokens_per_round),
                _means(f"{name}, wait per round, ms", both, lambda f: f.mean_wait_ms, lambda r: r.mean_wait_ms),
            ]
        if both and mode == "ssd":
            rows += [
                _means("SSD, hit rate", both, lambda f: f.cache_hit_rate, lambda r: r.hit_rate),
                _means("SSD, build, ms", both, lambda f: f.mean_build_ms, lambda r: r.mean_build_ms),
            ]
    return rows


def _tokens_per_round(result: SimResult) -> float:
    return result.tokens_per_round


def _means(
    name: str,
    both: Iterable[tuple[RunFigures, SimResult]],
    measured: Callable[[RunFigures], float | None],
    simulated: Callable[[SimResult], float | None],
) -> Comparison:
    known = [(m, s) for f, r in both if (m := measured(f)) is not None and (s := simulated(r)) is not None]
    if not known:
        return Comparison(name, None, None)
    return Comparison(name, fmean(m for m, _ in known), fmean(s for _, s in known))


def _median_over_prompts(values: Iterable[tuple[tuple[int, int], float | None]]) -> float | None:
    """A prompt's repeats are reduced to their median first, as the benchmark does."""
    by_prompt: dict[int, list[float]] = {}
    for (prompt, _), value in values:
        if value is not None:
            by_prompt.setdefault(prompt, []).append(value)
    return median(median(repeats) for repeats in by_prompt.values()) if by_prompt else None


def _pool(runs: Sequence[RunFigures]) -> RunFigures:
    pooled = {}
    for f in fields(RunFigures):
        values = [value for run in runs if (value := getattr(run, f.name)) is not None]
        if f.name.startswith("num_") and f.name != "num_devices":
            pooled[f.name] = sum(values)
        elif f.name != "acceptance_histogram" and values:
            pooled[f.name] = fmean(values)
    figures = replace(RunFigures(), **pooled)
    steps, cached = figures.num_spec_steps, figures.num_cache_hits + figures.num_cache_misses
    return replace(
        figures,
        num_devices=round(figures.num_devices),
        mean_acceptance_length=1 + figures.num_accepted_draft_tokens / steps if steps else None,
        cache_hit_rate=figures.num_cache_hits / cached if cached else None,
        mean_acceptance_length_hit=_weighted(runs, "mean_acceptance_length_hit", "num_cache_hits"),
        mean_acceptance_length_miss=_weighted(runs, "mean_acceptance_length_miss", "num_cache_misses"),
    )


def _weighted(runs: Sequence[RunFigures], name: str, weight: str) -> float | None:
    known = [(value, getattr(run, weight)) for run in runs if (value := getattr(run, name)) is not None]
    total = sum(count for _, count in known)
    return sum(value * count for value, count in known) / total if total else None
