"""Simulates AR, SD and SSD for given times and chances: python -m saguaro_core.simulate --help.

Three sources of inputs: the options, a benchmark's JSON file (--from), and the setting of arXiv 2603.03251 (--paper).
Standard output carries the tables only. Exit status: 0 simulated, 2 the arguments cannot be used.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from saguaro_core.config import MODES, Mode
from saguaro_core.simulate_bench import RATIOS, Comparison, compare, scenarios
from saguaro_core.simulate_closed import fit_power_law, speed_model, stationary_hit_rate
from saguaro_core.simulate_events import SimEvent
from saguaro_core.simulate_file import read_benchmark
from saguaro_core.simulate_model import Chances, Cost, Plan, Scenario, Times
from saguaro_core.simulate_options import check_options, make_parser, scenarios_of, shares
from saguaro_core.simulate_paper import HIT_RATE, PAPER, REPRODUCTION, Measured, batch_rows, paper_rows
from saguaro_core.simulate_run import SimResult, simulate
from saguaro_core.simulate_table import Cell, percent, relative, table

_BASES: tuple[Mode, Mode] = ("ar", "sd")

__all__ = ["Chances", "Cost", "Plan", "Scenario", "SimEvent", "SimResult", "Times", "main", "simulate", "speed_model"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; argparse exits by itself with status 2."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        text = _answer(options)
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.write(text)
    return 0


def _answer(options: argparse.Namespace) -> str:
    check_options(options)
    if options.paper:
        return _paper(options)
    if options.file is not None:
        return _from_file(options)
    parts = []
    for acceptance in shares(options.acceptance or "0.6"):
        found = scenarios_of(options, acceptance)
        parts.append(f"acceptance {acceptance:g}\n{_modes_table(found, options.seed)}")
    return "\n".join([*parts, *_timeline(found["ssd"], options)])


def _modes_table(found: Mapping[Mode, Scenario], seed: int) -> str:
    results = {mode: simulate(scenario, seed=seed) for mode, scenario in found.items()}
    rows: list[list[Cell]] = []
    for mode, result in results.items():
        predicted, speed = speed_model(found[mode]), result.tokens_per_second
        to_ar, to_sd = (_over(speed, results[base].tokens_per_second) for base in _BASES)
        rows.append(
            [
                mode.upper(),
                result.tokens_per_second,
                predicted,
                relative(predicted, speed),
                to_ar,
                to_sd,
                result.tokens_per_round,
                percent(result.hit_rate),
                percent(result.wait_share),
                result.tokens_per_second_per_sequence,
                result.tokens_per_second_per_device,
            ]
        )
    header = ["", "tokens/s", "speed model", "difference", "to AR", "to SD", "tokens/round, all", "hits", "waiting"]
    return table([*header, "per sequence", "per device"], rows)


def _over(value: float, base: float) -> float | None:
    return value / base if base else None


def _timeline(scenario: Scenario, options: argparse.Namespace) -> list[str]:
    if options.timeline == 0:
        return []
    events: list[SimEvent] = []
    simulate(scenario, seed=options.seed, trace=events.append)
    shown = events[: options.timeline]
    return ["".join(f"{e.time:10.2f} ms  round {e.round_index:<5} {e.place:<7} {e.what}\n" for e in shown)]


def _from_file(options: argparse.Namespace) -> str:
    benchmark = read_benchmark(options.file)
    rows = compare(benchmark, seed=options.seed)
    header = ["", "measured", "simulated", "difference", "Theorem 7", "difference"]
    text = table(header, [_comparison(row) for row in rows]) + _largest_difference(rows)
    if options.acceptance:
        found = scenarios(benchmark.pooled, benchmark)
        text += "\n" + _projection(found, shares(options.acceptance), options.seed)
    return text


def _comparison(row: Comparison) -> list[Cell]:
    cells: list[Cell] = [row.name, row.measured, row.simulated, relative(row.simulated, row.measured)]
    if row.predicted is None:
        return [*cells, "", ""]
    return [*cells, row.predicted, relative(row.predicted, row.measured)]


def _largest_difference(rows: Sequence[Comparison]) -> str:
    ratios = [(row.measured, row.simulated, row.predicted) for row in rows if " / " in row.name]
    known = [(abs(s / m - 1), abs(p / m - 1)) for m, s, p in ratios if m and s is not None and p is not None]
    if not known:
        return ""
    simulated, predicted = (max(column) for column in zip(*known, strict=True))
    return f"ratios: simulated within {simulated:.1%} of the measured ones, Theorem 7's within {predicted:.1%}\n"


def _projection(found: Mapping[Mode, Scenario], acceptances: Sequence[float], seed: int) -> str:
    """The same times and budget with a better draft: the speed model and the simulator side by side."""
    if set(found) != set(MODES):
        raise ValueError(f"the file holds runs of {', '.join(found)} only: --acceptance needs {', '.join(MODES)}.")
    measured = found["ssd"].chances
    fitted = fit_power_law(found["ssd"], measured.hit_rate or 0.0).chances.power_law_r
    rows = [_projected("as measured", found, seed)]
    for acceptance in acceptances:
        chances = Chances.alike(acceptance, power_law_r=fitted)
        better = {mode: replace(scenario, chances=chances) for mode, scenario in found.items()}
        rows.append(_projected(f"{acceptance:g}", better, seed))
    header = ["acceptance", "accepted/drafted", "tokens/round, all", "hits"]
    for fast, slow in RATIOS:
        header += [f"{fast.upper()}/{slow.upper()}", "simulated"]
    note = f"power law r = {fitted:.2f}, fitted to the measured hit rate and kept\n"
    return table(header, rows) + note


def _projected(name: str, found: Mapping[Mode, Scenario], seed: int) -> list[Cell]:
    model = {mode: speed_model(scenario) for mode, scenario in found.items()}
    results = {mode: simulate(scenario, seed=seed) for mode, scenario in found.items()}
    tokens, lookahead = found["sd"].chances.sd, found["sd"].plan.lookahead
    full = found["sd"].mean_tokens("miss") if tokens == found["sd"].chances.after_miss else None
    accepted = None if full is None else percent((full - 1) / lookahead)
    row: list[Cell] = [name, accepted, results["ssd"].tokens_per_round]
    row.append(percent(stationary_hit_rate(found["ssd"])))
    for fast, slow in RATIOS:
        row += [model[fast] / model[slow], results[fast].tokens_per_second / results[slow].tokens_per_second]
    return row


def _paper(options: argparse.Namespace) -> str:
    hit_rate = HIT_RATE if options.hit_rate is None else options.hit_rate
    parts = ["The paper's table. Acceptance is solved from SD; SSD is predicted."]
    parts.append(_paper_table(PAPER, hit_rate, options.seed))
    parts.append("A reproduction on H100 with other lookaheads.")
    parts.append(_paper_table(REPRODUCTION, hit_rate, options.seed))
    parts.append("Llama-3.1 70B / 1B in batches, K = 6: forwards as long as at batch 1.")
    rows: list[list[Cell]] = [
        [b.batch_size, b.measured, b.ssd.tokens_per_second, relative(b.ssd.tokens_per_second, b.measured), b.theorem]
        for b in batch_rows(hit_rate=hit_rate, seed=options.seed)
    ]
    parts.append(table(["batch", "measured", "simulated", "difference", "Theorem 17"], rows, digits=0))
    return "\n".join(parts)


def _paper_table(measured: tuple[Measured, ...], hit_rate: float, seed: int) -> str:
    rows: list[list[Cell]] = []
    for row in paper_rows(measured, hit_rate=hit_rate, seed=seed):
        paper, speed = row.measured, row.ssd.tokens_per_second
        rows.append(
            [
                paper.hardware.name,
                paper.data,
                row.acceptance,
                paper.sd,
                paper.ssd,
                speed,
                relative(speed, paper.ssd),
                row.theorem,
                relative(row.theorem, paper.ssd),
                paper.ssd / paper.sd,
                speed / paper.sd,
                paper.ssd / paper.ar,
                speed / paper.ar,
            ]
        )
    header = ["pair", "data", "a", "SD", "SSD", "simulated", "difference", "Theorem 7", "difference"]
    return table([*header, "SSD/SD", "simulated", "SSD/AR", "simulated"], rows)


if __name__ == "__main__":
    sys.exit(main())
