"""Simulates AR, SD and SSD for given times and chances: python -m saguaro_core.simulate --help.

Three sources of inputs: the options, a benchmark's JSON file (--from), and the setting of arXiv 2603.03251 (--paper).
Standard output carries the tables only. Exit status: 0 simulated, 2 the arguments cannot be used.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from saguaro_core.config import MODES, FanOutPolicy, Mode
from saguaro_core.simulate_bench import RATIOS, Comparison, compare, scenarios
from saguaro_core.simulate_closed import fit_power_law, speed_model, stationary_hit_rate
from saguaro_core.simulate_events import SimEvent
from saguaro_core.simulate_file import read_benchmark
from saguaro_core.simulate_model import BackupKind, Chances, Cost, EarlyPolicy, Plan, Scenario, Times
from saguaro_core.simulate_paper import HIT_RATE, PAPER, REPRODUCTION, Measured, batch_rows, paper_rows
from saguaro_core.simulate_run import SimResult, simulate
from saguaro_core.simulate_table import Cell, percent, relative, table
from saguaro_core.theory import acceptance_for, require_share

_BASES: tuple[Mode, Mode] = ("ar", "sd")

__all__ = ["Chances", "Cost", "Plan", "Scenario", "SimEvent", "SimResult", "Times", "main", "simulate", "speed_model"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; argparse exits by itself with status 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        text = _answer(options)
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.write(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    plan = Plan()
    parser = argparse.ArgumentParser(
        prog="python -m saguaro_core.simulate",
        description="Simulate the rounds of AR, SD and SSD, event by event, beside the speed model.",
        epilog="Times are milliseconds: one number, or ROWS:MS pairs between which straight lines are drawn.",
    )
    add = parser.add_argument
    add("--from", dest="file", type=Path, metavar="FILE", help="times and chances of a benchmark's --json file")
    add("--paper", action="store_true", help="the setting of arXiv 2603.03251, against its table")
    add("--acceptance", help="per drafted token, one or several between commas (0.6; with --from: the measured one)")
    add("--acceptance-hit", type=float, help="after a hit, where it differs")
    add("--acceptance-miss", type=float, help="after a miss, where it differs")
    add("--power-law", type=float, default=1.0, help="r: a bonus token lies beyond F candidates with (F + 1)^-r (1)")
    add("--hit-rate", type=float, help="instead of the power law")
    add("--verify", default="1:35,4:43", help="time of the target by rows (%(default)s)")
    add("--draft-step", default="1:5.7,12:11.8", help="time of the draft by rows (%(default)s)")
    for name, what in (
        ("serve", "the draft's work per answer besides forwards"),
        ("plant", "choosing the outcomes to prepare"),
        ("overhead", "the target's work between a verdict and its next round"),
        ("link", "one way between the devices"),
    ):
        add(f"--{name}", type=float, default=0.0, metavar="MS", help=f"{what} (0)")
    add("--lookahead", type=int, default=plan.lookahead, help="K (%(default)s)")
    add("--budget", type=int, default=plan.budget, help="prepared outcomes per sequence (%(default)s)")
    add("--fan-out", default=plan.fan_out, choices=[p for p in get_args(FanOutPolicy) if p != "list"])
    add("--backup", default=plan.backup, choices=get_args(BackupKind))
    add("--backup-lookahead", type=int, help="tokens that the backup drafts (K)")
    add("--backup-tokens", type=float, help="E_miss of the backup, instead of --acceptance-miss")
    add("--early", default=plan.early, choices=get_args(EarlyPolicy), help="for a verdict before the cache is complete")
    add("--batch-size", type=int, default=plan.batch_size, help="sequences decoded together (%(default)s)")
    add("--tokens", type=int, default=512, help="per sequence (%(default)s)")
    add("--answers", type=int, default=plan.num_answers, help="how often that is repeated (%(default)s)")
    add("--target-devices", type=int, default=plan.num_target_devices, help="for speed per device (%(default)s)")
    add("--draft-devices", type=int, default=plan.num_draft_devices, help="that share the branches (%(default)s)")
    add("--seed", type=int, default=0, help="of the random numbers (%(default)s)")
    add("--timeline", type=int, default=0, metavar="N", help="list the first N events of SSD")
    return parser


def _answer(options: argparse.Namespace) -> str:
    if options.paper:
        return _paper(options)
    if options.file is not None:
        return _from_file(options)
    parts = []
    for acceptance in _shares(options.acceptance or "0.6"):
        found = _from_options(options, acceptance)
        parts.append(f"acceptance {acceptance:g}\n{_modes_table(found, options.seed)}")
    return "\n".join([*parts, *_timeline(found["ssd"], options)])


def _shares(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"acceptance is {text!r}: write numbers between commas, such as 0.6,0.7.") from None
    for value in values:
        require_share("acceptance", value)
    return values


def _from_options(options: argparse.Namespace, acceptance: float) -> dict[Mode, Scenario]:
    after_hit = acceptance if options.acceptance_hit is None else options.acceptance_hit
    after_miss = acceptance if options.acceptance_miss is None else options.acceptance_miss
    plan = Plan(
        lookahead=options.lookahead,
        budget=options.budget,
        fan_out=options.fan_out,
        backup=options.backup,
        backup_lookahead=options.backup_lookahead,
        early=options.early,
        batch_size=options.batch_size,
        num_tokens=options.tokens,
        num_answers=options.answers,
        num_target_devices=options.target_devices,
        num_draft_devices=options.draft_devices,
    )
    if options.backup_tokens is not None:
        after_miss = acceptance_for(options.backup_tokens, plan.backup_tokens)
    chances = Chances(
        after_hit=(after_hit,),
        after_miss=(after_miss,),
        sd=(acceptance,),
        power_law_r=options.power_law,
        hit_rate=options.hit_rate,
    )
    names = ("serve", "plant", "overhead", "link")
    fixed: dict[str, Any] = {name: getattr(options, name) for name in names}
    times = Times(verify=Cost.parse(options.verify), draft=Cost.parse(options.draft_step), **fixed)
    # SD drafts K tokens whatever the backup of SSD does.
    plans = {mode: replace(plan, backup_lookahead=None) if mode == "sd" else plan for mode in MODES}
    return {mode: Scenario(mode=mode, times=times, chances=chances, plan=plans[mode]) for mode in MODES}


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
    header = ["", "tokens/s", "speed model", "difference", "to AR", "to SD", "tokens/round", "hits", "waiting"]
    return table([*header, "per sequence", "per device"], rows)


def _over(value: float, base: float) -> float | None:
    return value / base if base else None


def _timeline(scenario: Scenario, options: argparse.Namespace) -> list[str]:
    if options.timeline <= 0:
        return []
    events: list[SimEvent] = []
    simulate(scenario, seed=options.seed, trace=events.append)
    shown = events[: options.timeline]
    return ["".join(f"{e.time:10.2f} ms  round {e.round_index:<5} {e.place:<7} {e.what}\n" for e in shown)]


def _from_file(options: argparse.Namespace) -> str:
    benchmark = read_benchmark(options.file)
    rows = [_comparison(row) for row in compare(benchmark, seed=options.seed)]
    header = ["", "measured", "simulated", "difference", "Theorem 7", "difference"]
    text = table(header, rows)
    if options.acceptance:
        found = scenarios(benchmark.pooled, benchmark)
        text += "\n" + _projection(found, _shares(options.acceptance), options.seed)
    return text


def _comparison(row: Comparison) -> list[Cell]:
    cells: list[Cell] = [row.name, row.measured, row.simulated, relative(row.simulated, row.measured)]
    if row.predicted is None:
        return [*cells, "", ""]
    return [*cells, row.predicted, relative(row.predicted, row.measured)]


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
    header = ["acceptance", "accepted/drafted", "tokens/round", "hits"]
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
