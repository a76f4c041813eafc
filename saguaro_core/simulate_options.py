"""The options of the simulator's command line, and the scenarios that they describe."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from saguaro_core.config import MODES, FanOutPolicy, Mode
from saguaro_core.simulate_model import BackupKind, Chances, Cost, EarlyPolicy, Plan, Scenario, Times
from saguaro_core.theory import acceptance_for, require_share

_FIXED_TIMES = {
    "serve": "the draft's work per answer besides forwards",
    "plant": "choosing the outcomes to prepare",
    "overhead": "the target's work between a verdict and its next round",
    "link": "one way between the devices",
}


def make_parser() -> argparse.ArgumentParser:
    """All options with their defaults."""
    parser = argparse.ArgumentParser(
        prog="python -m saguaro_core.simulate",
        description="Simulate the rounds of AR, SD and SSD, event by event, beside the speed model.",
        epilog="Times are milliseconds: one number, or ROWS:MS pairs between which straight lines are drawn.",
    )
    add = parser.add_argument
    add("--from", dest="file", type=Path, metavar="FILE", help="times and chances of a benchmark's --json file")
    add("--paper", action="store_true", help="the setting of arXiv 2603.03251, against its table")
    _add_chances(parser)
    _add_times(parser)
    _add_plan(parser)
    add("--seed", type=int, default=0, help="of the random numbers (%(default)s)")
    add("--timeline", type=int, default=0, metavar="N", help="list the first N events of SSD")
    return parser


def _add_chances(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--acceptance", help="per drafted token, one or several between commas (0.6; with --from: the measured one)")
    add("--acceptance-hit", type=float, help="after a hit, where it differs")
    add("--acceptance-miss", type=float, help="after a miss, where it differs")
    add("--power-law", type=float, default=1.0, help="r: a bonus token lies beyond F candidates with (F + 1)^-r (1)")
    add("--hit-rate", type=float, help="instead of the power law")


def _add_times(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--verify", default="1:35,4:43", help="time of the target by rows (an example: %(default)s)")
    parser.add_argument("--draft-step", default="1:5.7,12:11.8", help="time of the draft by rows (%(default)s)")
    for name, what in _FIXED_TIMES.items():
        parser.add_argument(f"--{name}", type=float, default=0.0, metavar="MS", help=f"{what} (0)")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add, plan = parser.add_argument, Plan()
    add("--lookahead", type=int, default=plan.lookahead, help="K (%(default)s)")
    add("--budget", type=int, default=plan.budget, help="prepared outcomes per sequence (%(default)s)")
    add(
        "--fan-out", default=plan.fan_out, choices=[p for p in get_args(FanOutPolicy) if p not in ("list", "confident")]
    )
    add("--backup", default=plan.backup, choices=get_args(BackupKind))
    add("--backup-lookahead", type=int, help="tokens that the backup drafts (K)")
    add("--backup-tokens", type=float, help="E_miss of the backup, instead of --acceptance-miss")
    add("--early", default=plan.early, choices=get_args(EarlyPolicy), help="for a verdict before the cache is complete")
    add("--batch-size", type=int, default=plan.batch_size, help="sequences decoded together (%(default)s)")
    add("--tokens", type=int, default=512, help="per sequence (%(default)s)")
    add("--answers", type=int, default=plan.num_answers, help="how often that is repeated (%(default)s)")
    add("--target-devices", type=int, default=plan.num_target_devices, help="for speed per device (%(default)s)")
    add("--draft-devices", type=int, default=plan.num_draft_devices, help="that share the branches (%(default)s)")


def check_options(options: argparse.Namespace) -> None:
    """Refuse what would be passed over in silence. Raises ValueError that says what to do."""
    if options.timeline < 0:
        raise ValueError(f"timeline is {options.timeline}: give a number of events, 0 for none.")
    if options.paper and options.acceptance is not None:
        raise ValueError(
            f"acceptance is {options.acceptance!r}: --paper solves it from the paper's SD; leave one of the two out."
        )


def shares(text: str) -> list[float]:
    """Numbers from 0 to 1 between commas. Raises ValueError that says what to write."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"acceptance is {text!r}: write numbers between commas, such as 0.6,0.7.") from None
    for value in values:
        require_share("acceptance", value)
    return values


def scenarios_of(options: argparse.Namespace, acceptance: float) -> dict[Mode, Scenario]:
    """One scenario per mode at this acceptance. Raises ValueError for what cannot be used."""
    plan = _plan(options)
    after_hit = acceptance if options.acceptance_hit is None else options.acceptance_hit
    after_miss = acceptance if options.acceptance_miss is None else options.acceptance_miss
    if options.backup_tokens is not None:
        after_miss = acceptance_for(options.backup_tokens, plan.backup_tokens)
    chances = Chances(
        after_hit=(after_hit,),
        after_miss=(after_miss,),
        sd=(acceptance,),
        power_law_r=options.power_law,
        hit_rate=options.hit_rate,
    )
    fixed: dict[str, Any] = {name: getattr(options, name) for name in _FIXED_TIMES}
    times = Times(verify=Cost.parse(options.verify), draft=Cost.parse(options.draft_step), **fixed)
    # SD drafts K tokens whatever the backup of SSD does.
    plans = {mode: replace(plan, backup_lookahead=None) if mode == "sd" else plan for mode in MODES}
    return {mode: Scenario(mode=mode, times=times, chances=chances, plan=plans[mode]) for mode in MODES}


def _plan(options: argparse.Namespace) -> Plan:
    return Plan(
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
