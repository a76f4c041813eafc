"""From a benchmark's JSON file to scenarios, and measured against simulated against predicted.

Every pair of runs (one prompt, one repeat, all modes) becomes scenarios with that pair's own times, acceptance and hit
rate; ratios are then reduced as the benchmark reduces them, to the median over prompts. What is simulated is how the
two devices' work falls in time: how long SSD waited and how fast it was do not go in (its waits only to be taken off
its rounds, which leaves the target's own work).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from saguaro_core.config import Mode, SpeculationConfig
from saguaro_core.run_figures import RunFigures
from saguaro_core.simulate_closed import speed_model
from saguaro_core.simulate_file import Benchmark, Pair
from saguaro_core.simulate_model import Chances, Cost, Plan, Scenario, Times
from saguaro_core.simulate_run import SimResult, simulate
from saguaro_core.theory import acceptance_for

ROUNDS_PER_PAIR = 1000
RATIOS: tuple[tuple[Mode, Mode], ...] = (("sd", "ar"), ("ssd", "ar"), ("ssd", "sd"))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure: measured, simulated, and by Theorem 7; None where the theorem does not say."""

    name: str
    measured: float | None
    simulated: float | None
    predicted: float | None = None


def scenarios(pair: Pair, benchmark: Benchmark) -> dict[Mode, Scenario]:
    """A pair's runs as scenarios. A mode whose run never verified, or never drafted, is left out."""
    found: dict[Mode, Scenario] = {}
    for mode, figures in pair.items():
        is_usable = mode == "ar" or (figures.num_spec_steps > 0 and figures.mean_acceptance_length is not None)
        if figures.mean_verify_ms and is_usable and figures.num_tokens > 1:
            found[mode] = _scenario(mode, pair, benchmark)
    return found


def _scenario(mode: Mode, pair: Pair, benchmark: Benchmark) -> Scenario:
    figures, speculation = pair[mode], benchmark.speculation
    per_round = figures.mean_acceptance_length or 1.0
    plan = Plan(
        lookahead=speculation.lookahead,
        budget=sum(speculation.fan_out_list) if speculation.fan_out == "list" else speculation.budget,
        # What the draft thinks of single tokens is not simulated.
        fan_out="geometric" if speculation.fan_out == "confident" else speculation.fan_out,
        fan_out_list=speculation.fan_out_list,
        backup="fast" if speculation.fallback == "fast" else "neural",
        backup_lookahead=_backup_length(figures, speculation),
        early="full" if speculation.service == "full" else "ready",
        num_tokens=max(figures.num_tokens, math.ceil(3 * per_round)),
        num_answers=math.ceil(ROUNDS_PER_PAIR * per_round / figures.num_tokens),
    )
    chances = _chances(figures, speculation.lookahead, plan.backup_tokens)
    return Scenario(mode=mode, times=_times(mode, pair, plan), chances=chances, plan=plan)


def _backup_length(figures: RunFigures, speculation: SpeculationConfig) -> int:
    """The run does not tell speculations after hits and misses apart: the mean length of all, rounded up."""
    mean = figures.num_draft_tokens / max(1, figures.num_spec_steps)
    return min(speculation.lookahead, max(1, math.ceil(mean)))


def _chances(figures: RunFigures, lookahead: int, backup_tokens: int) -> Chances:
    """The acceptances that give the run's own tokens per round; a state that never occurred takes the run's mean."""
    mean = figures.mean_acceptance_length or 1.0

    def acceptance(tokens: float | None, drafted: int) -> tuple[float, ...]:
        return (acceptance_for(max(1.0, mean if tokens is None else tokens), drafted),)

    return Chances(
        after_hit=acceptance(figures.mean_acceptance_length_hit, lookahead),
        after_miss=acceptance(figures.mean_acceptance_length_miss, backup_tokens),
        sd=acceptance(None, backup_tokens),
        hit_rate=figures.cache_hit_rate or 0.0,
    )


def _times(mode: Mode, pair: Pair, plan: Plan) -> Times:
    """A run's mean verification stands for each of its rounds: it holds the mix of rows that the run had."""
    figures = pair[mode]
    verify, overhead = Cost(((1, figures.mean_verify_ms or 0.0),)), _overhead_ms(figures)
    if mode == "ar":
        return Times(verify=verify, draft=Cost(((1, 0.0),)), overhead=overhead)
    is_fast = mode == "ssd" and plan.backup == "fast"
    return Times(
        verify=verify,
        draft=_draft_cost(mode, pair, plan),
        serve=(figures.mean_fallback_ms or 0.0) if is_fast else 0.0,
        overhead=overhead,
        link=_link_ms(pair),
    )


def _draft_cost(mode: Mode, pair: Pair, plan: Plan) -> Cost:
    """A row costs a step of SD or of the fallback; the budget's rows cost an equal part of what remains of a build."""
    figures = pair[mode]
    step = figures.mean_step_ms
    if mode == "ssd" and figures.mean_fallback_ms is not None and plan.backup == "neural":
        step = figures.mean_fallback_ms / plan.backup_tokens
    if step is None:
        step = (pair["sd"].mean_step_ms if "sd" in pair else None) or 0.0
    if mode == "sd" or plan.budget == 1 or figures.mean_build_ms is None:
        return Cost(((1, step),))
    return Cost(((1, step), (plan.budget, max(0.0, figures.mean_build_ms - step) / plan.lookahead)))


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
        found = scenarios(benchmark.pairs[key], benchmark)
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
                _means(f"{name}, tokens per round, all", both, _measured_tokens, lambda r: r.tokens_per_round),
                _means(f"{name}, wait per round, ms", both, lambda f: f.mean_wait_ms, lambda r: r.mean_wait_ms),
            ]
        if both and mode == "ssd":
            rows += [
                _means("SSD, hit rate", both, lambda f: f.cache_hit_rate, lambda r: r.hit_rate),
                _means("SSD, build, ms", both, lambda f: f.mean_build_ms, lambda r: r.mean_build_ms),
            ]
    return rows


def _measured_tokens(figures: RunFigures) -> float | None:
    """Plain rounds count here too, as in the simulation."""
    return figures.num_tokens / figures.num_rounds if figures.num_rounds else figures.mean_acceptance_length


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
