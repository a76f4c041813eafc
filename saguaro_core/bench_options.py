"""The benchmark's command line: its options, checked before an engine is started."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from saguaro_core.batch_request import MAX_BATCH
from saguaro_core.bench_measure import BenchPlan
from saguaro_core.bench_stretch import NOISE, Stretching
from saguaro_core.config import (
    MODES,
    CopyingPolicy,
    CpuWeights,
    DeepeningPolicy,
    EngineConfig,
    FallbackPolicy,
    Mode,
    Placement,
    SamplingParams,
    ServicePolicy,
    SpeculationConfig,
    VerificationRule,
)
from saguaro_core.errors import InvalidRequest
from saguaro_core.peers.kinds import PeerOptions
from saguaro_core.peers.options import add_peer_options, read_peer_options
from saguaro_core.prompts import PROMPTS, select_prompts

Work = Literal["measure", "profile", "memory", "batches"]
PairName = Literal["default", "stretch"]

QUICK = {"prompts": 4, "max_new_tokens": 64}
# A target ten times as costly: as many rounds in about the same time would say nothing.
QUICK_STRETCH = {"prompts": 4, "max_new_tokens": 32}
FULL = {"prompts": len(PROMPTS), "max_new_tokens": 128}
MAX_REPEATS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What the arguments ask for, checked. With a `stretching` the target is the fixture, made when it is needed.

    `work` is what is done with the pair: measured (the default), or looked at in another way.
    """

    plan: BenchPlan
    config: EngineConfig
    json_file: Path | None
    stretching: Stretching | None = None
    work: Work = "measure"
    batch_sizes: tuple[int, ...] = ()
    peers: PeerOptions | None = None


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
    add(
        "--fan-out",
        default=speculation.fan_out,
        help="confident, geometric, uniform, or K + 1 counts, as 4,3,2,3 (%(default)s)",
    )
    add("--fallback", default=speculation.fallback, help=_choices(FallbackPolicy))
    add("--service", default=speculation.service, help=f"how much SSD serves: {_choices(ServicePolicy)}")
    add("--copying", default=speculation.copying, help=f"copies of n-grams in the draft: {_choices(CopyingPolicy)}")
    add("--deepening", default=speculation.deepening, help=f"branches that grow: {_choices(DeepeningPolicy)}")
    add("--rule", default=speculation.rule, help=_choices(VerificationRule))
    add(
        "--pair", default="default", help=f"{_choices(PairName)}; stretch is a fixture as costly as 1.5 billion weights"
    )
    add("--stretch-noise", type=float, default=NOISE, help="its perturbation, in standard deviations (%(default)s)")
    add("--target", help=f"catalogue name, hub id or folder ({engine.target})")
    add("--draft", help=f"catalogue name, hub id or folder ({engine.draft})")
    add("--placement", default="auto", help="auto, or target=DEVICE,draft=DEVICE (%(default)s)")
    add("--cpu-weights", default=engine.cpu_weights, help=f"their form on CPUs: {_choices(CpuWeights)}")
    add("--repeats", type=int, default=1, help="how often the whole plan is run (%(default)s)")
    add("--quick", action="store_true", help="about a minute: 4 prompts, 64 tokens each")
    add("--ar-all-cores", action="store_true", help="also AR with the cores of both, in an engine of its own (CPU)")
    add("--profile", action="store_true", help="instead: where the time of an SSD round goes, part by part")
    add("--memory", action="store_true", help="instead: what app, engine and draft hold while one comparison runs")
    add("--batch", help="instead: batches of these sizes, such as 1,2,4,8, with both fallbacks, and b*")
    add("--json", type=Path, metavar="FILE", help="write the figures and every run there")
    add_peer_options(parser)
    return parser


def _choices(alias: Any) -> str:
    return f"one of {', '.join(get_args(alias))} (%(default)s)"


def _command(options: argparse.Namespace) -> Command:
    """Check everything before an engine is started. Raises InvalidRequest."""
    stretching = _stretching(options)
    sizes = FULL if not options.quick else QUICK if stretching is None else QUICK_STRETCH
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
        ar_all_cores=options.ar_all_cores,
    )
    config = EngineConfig(
        target=EngineConfig().target if options.target is None else options.target,
        draft=_draft(options, stretching),
        placement=Placement.parse(options.placement),
        cpu_weights=options.cpu_weights,
    )
    return Command(
        plan=plan,
        config=config,
        json_file=options.json,
        stretching=stretching,
        work=_work(options),
        batch_sizes=_batch_sizes(options.batch),
        peers=read_peer_options(options, plan),
    )


def _draft(options: argparse.Namespace, stretching: Stretching | None) -> str:
    if stretching is not None:
        return stretching.base
    draft: str = EngineConfig().draft if options.draft is None else options.draft
    return draft


def _stretching(options: argparse.Namespace) -> Stretching | None:
    if options.pair not in get_args(PairName):
        raise InvalidRequest(f"pair is {options.pair!r}: choose one of {', '.join(get_args(PairName))}.")
    if options.pair == "default":
        return None
    if options.target is not None or options.draft is not None:
        raise InvalidRequest(f"pair is {options.pair!r} and brings both models: leave out --target and --draft.")
    return Stretching(noise=options.stretch_noise)


def _work(options: argparse.Namespace) -> Work:
    given: list[Work] = ["profile"] if options.profile else []
    given += ["memory"] if options.memory else []
    given += ["batches"] if options.batch is not None else []
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)} are both given: ask for one at a time.")
    return given[0] if given else "measure"


def _batch_sizes(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    sizes = [int(part) for part in parts if part.isdecimal()]
    if len(sizes) < len(parts) or len(set(sizes)) < len(sizes) or not all(1 <= size <= MAX_BATCH for size in sizes):
        raise InvalidRequest(f"batch is {text!r}: give sizes from 1 to {MAX_BATCH}, each once, such as 1,2,4,8.")
    return tuple(sizes)


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
        lookahead=options.lookahead,
        rule=options.rule,
        budget=options.budget,
        fallback=options.fallback,
        service=options.service,
        deepening=options.deepening,
        copying=options.copying,
        **shape,
    )


def _counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidRequest(f"fan_out is {text!r}: write counts between commas, such as 4,3,2,3.") from None
