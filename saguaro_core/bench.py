"""Measures AR, SD and SSD on this machine and prints one table: python -m saguaro_core.bench --help.

Standard output carries the table only; progress and errors go to standard error. Exit status: 0 measured, 1 a run
failed, 2 the arguments cannot be used, 130 interrupted.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol, cast, get_args

from saguaro_core.bench_measure import BenchPlan, DecodingEngine, Measurement, measure
from saguaro_core.bench_report import summarise
from saguaro_core.bench_table import format_report
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
from saguaro_core.engine import Engine
from saguaro_core.errors import InvalidRequest, ModelError, SaguaroError
from saguaro_core.prompts import PROMPTS, select_prompts
from saguaro_core.status import EngineInfo, EngineStatus

QUICK = {"prompts": 4, "max_new_tokens": 64}
FULL = {"prompts": len(PROMPTS), "max_new_tokens": 128}
MAX_REPEATS = 100


class BenchEngine(DecodingEngine, Protocol):
    """The engine's client, as far as the command line uses it."""

    def start(self) -> None: ...
    def wait_ready(self, timeout: float | None = None) -> EngineInfo: ...
    def close(self) -> None: ...


EngineFactory = Callable[[EngineConfig, Callable[[EngineStatus], None]], BenchEngine]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What the arguments ask for, checked."""

    plan: BenchPlan
    config: EngineConfig
    json_file: Path | None


def start_engine(config: EngineConfig, on_status: Callable[[EngineStatus], None]) -> BenchEngine:
    """The real engine, in its own processes."""
    return Engine(config, on_status=on_status)


def main(arguments: Sequence[str] | None = None, make_engine: EngineFactory = start_engine) -> int:
    """Run the command line and return its exit status; argparse exits by itself with status 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        command = _command(options)
    except InvalidRequest as error:
        parser.error(str(error))
    try:
        _measure_and_print(command, make_engine)
    except KeyboardInterrupt:
        _say("\ninterrupted")
        return 130
    except (SaguaroError, OSError) as error:
        _say(f"\nerror: {error}")
        return 1
    return 0


def _say(text: str, end: str = "\n") -> None:
    sys.stderr.write(text + end)
    sys.stderr.flush()


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
    _require_between("prompts", num_prompts, 1, len(PROMPTS))
    _require_between("repeats", options.repeats, 1, MAX_REPEATS)
    _require_writable(options.json)
    plan = BenchPlan(
        modes=_modes(options.modes),
        prompts=select_prompts(num_prompts),
        repeats=options.repeats,
        sampling=SamplingParams(temperature=options.temperature, seed=options.seed, max_new_tokens=cap),
        speculation=_speculation(options),
    )
    config = EngineConfig(target=options.target, draft=options.draft, placement=Placement.parse(options.placement))
    return Command(plan=plan, config=config, json_file=options.json)


def _require_between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}: give a whole number from {low} to {high}.")


def _require_writable(path: Path | None) -> None:
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


def _measure_and_print(command: Command, make_engine: EngineFactory) -> None:
    with closing(make_engine(command.config, _StatusLine())) as engine:
        engine.start()
        info = engine.wait_ready()
        if info.draft is None and set(command.plan.modes) != {"ar"}:
            raise ModelError(f"no draft is loaded, so only --modes ar can run: {info.draft_error}")
        measurements = _measure_all(engine, command.plan)
    report = summarise(measurements, command.plan.prompts)
    sys.stdout.write(format_report(report))
    if command.json_file is not None:
        data = report.to_json(_details(command, info))
        command.json_file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _measure_all(engine: BenchEngine, plan: BenchPlan) -> list[Measurement]:
    measurements: list[Measurement] = []
    _say("warming up", end="")
    for measurement in measure(engine, plan):
        measurements.append(measurement)
        speed = measurement.figures.decode_tokens_per_second
        shown = "n/a" if speed is None else f"{speed:.1f} tokens/s"
        count = f"run {len(measurements)} of {plan.num_runs}"
        _say(f"\r{count}: prompt {measurement.prompt + 1}, {measurement.mode}, {shown}".ljust(70), end="")
    _say("\n")
    return measurements


class _StatusLine:
    """Says each step of loading once."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, status: EngineStatus) -> None:
        if status.message != self._last and status.state in ("starting", "loading"):
            self._last = status.message
            _say(status.message)


def _details(command: Command, info: EngineInfo) -> dict[str, Any]:
    plan = command.plan
    return {
        "settings": {
            "modes": plan.modes,
            "num_prompts": len(plan.prompts),
            "repeats": plan.repeats,
            "sampling": asdict(plan.sampling),
            "speculation": asdict(plan.speculation),
        },
        "engine": {f.name: getattr(command.config, f.name) for f in fields(command.config) if f.name != "placement"},
        "placement": asdict(command.config.placement),
        "models": {"target": asdict(info.target), "draft": None if info.draft is None else asdict(info.draft)},
        "num_devices": info.num_devices,
        "hardware": info.hardware,
        "versions": info.versions,
        "engine_notes": info.notes,
    }


if __name__ == "__main__":
    sys.exit(main())
