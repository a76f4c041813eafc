"""The benchmark's command line: its options, checked before an engine is started."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from saguaro_core.bench_measure import BenchPlan
from saguaro_core.config import (
    MODES,
    EngineConfig,
    FallbackPolicy,
    Mode,
    Placement,
    SamplingParams,
    SpeculationConfig,
    VerificationRule,
)
from saguaro_core.errors import InvalidRequest
from saguaro_core.prompts import PROMPTS, select_prompts

QUICK = {"prompts": 4, "max_new_tokens": 64}
FULL = {"prompts": len(PROMPTS), "max_new_tokens": 128}
MAX_REPEATS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What the arguments ask for, checked."""

    plan: BenchPlan
    config: EngineConfig
    json_file: Path | None


def read_command(arguments: Sequence[str] | None) -> Command:
    """What the arguments ask for; argparse ends the program with status 2 for what cannot be used."""
    parser = _parser()
    try:
        return _command(parser.parse_args(arguments))
    except InvalidRequest as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    sampling, speculation, engine = SamplingParams(), SpeculationConfig(), EngineConfig()
    parser = argparse.ArgumentParser(
        prog="python -m saguaro_core.bench",
        description="Measure AR, SD and SSD in paired runs on this machine.",
    )
    add = parser.add_argument
    add("--modes", default=",".join(MODES), help="modes to run, in this order (%(default)s)")
    add("--prompts", type=int, help=f"how many prompts, the four kinds in turn ({len(PROMPTS)}, all; quick: 4)")
    add("--max-new-tokens", type=int, help="tokens per answer (128; quick: 64)")
    add("--temperature", type=float, default=sampling.temperature, help="0, greedy, to 2 (%(default)s)")
    add("--seed", type=int, default=sampling.seed, help="of the noise at temperatures above 0 (%(default)s)")
    add("--lookahead", type=int, default=speculation.lookahead, help="K, draft tokens per round (%(default)s)")
    add("--budget", type=int, default=speculation.budget, help="outcomes that SSD prepares per round (%(default)s)")
    add("--fan-out", default=speculation.fan_out, help="geometric, uniform, or K + 1 counts, as 4,3,2,3 (%(default)s)")
    add("--fallback", default=speculation.fallback, help=_choices(FallbackPolicy))
    add("--rule", default=speculation.rule, help=_choices(VerificationRule))
    add("--target", default=engine.target, help="catalogue name, hub id or folder (%(default)s)")
    add("--draft", default=engine.draft, help="catalogue name, hub id or folder (%(default)s)")
    add("--placement", default="auto", help="auto, or target=DEVICE,draft=DEVICE (%(default)s)")
    add("--repeats", type=int, default=1, help="how often the whole plan is run (%(default)s)")
    add("--quick", action="store_true", help="about a minute: 4 prompts, 64 tokens each")
    add("--json", type=Path, metavar="FILE", help="write the figures and every run there")
    return parser


def _choices(alias: Any) -> str:
    return f"one of {', '.join(get_args(alias))} (%(default)s)"


def _command(options: argparse.Namespace) -> Command:
    """Check everything before an engine is started. Raises InvalidRequest."""
    sizes = QUICK if options.quick else FULL
    num_prompts = sizes["prompts"] if options.prompts is None else options.prompts
    cap = sizes["max_new_tokens"] if options.max_new_tokens is None else options.max_new_tokens
    require_between("prompts", num_prompts, 1, len(PROMPTS))
    require_between("repeats", options.repeats, 1, MAX_REPEATS)
    require_writable(options.json)
    plan = BenchPlan(
        modes=_modes(options.modes),
        prompts=select_prompts(num_prompts),
        repeats=options.repeats,
        sampling=SamplingParams(temperature=options.temperature, seed=options.seed, max_new_tokens=cap),
        speculation=_speculation(options),
    )
    config = EngineConfig(target=options.target, draft=options.draft, placement=Placement.parse(options.placement))
    return Command(plan=plan, config=config, json_file=options.json)


def require_between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}: give a whole number from {low} to {high}.")


def require_writable(path: Path | None) -> None:
    """A run of minutes must not end in a file that cannot be written."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise InvalidRequest(f"json is {str(path)!r}: give a file in a folder that exists.")


def _modes(text: str) -> tuple[Mode, ...]:
    names = [name.strip().lower() for name in text.split(",")]
    if not set(names) <= set(MODES) or len(set(names)) != len(names):
        raise InvalidRequest(f"modes is {text!r}: give some of {','.join(MODES)}, each once.")
    return cast(tuple[Mode, ...], tuple(names))


def _speculation(options: argparse.Namespace) -> SpeculationConfig:
    shape: dict[str, Any] = {"fan_out": options.fan_out}
    if options.fan_out.replace(",", "").replace(" ", "").isdecimal():
        shape = {"fan_out": "list", "fan_out_list": tuple(_counts(options.fan_out))}
    return SpeculationConfig(
        lookahead=options.lookahead, rule=options.rule, budget=options.budget, fallback=options.fallback, **shape
    )


def _counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidRequest(f"fan_out is {text!r}: write counts between commas, such as 4,3,2,3.") from None
