"""Measures AR, SD and SSD on this machine and prints one table: python -m saguaro_core.bench --help.

Standard output carries the table only; progress and errors go to standard error. Exit status: 0 measured, 1 a run
failed, 2 the arguments cannot be used, 130 interrupted.
"""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, fields
from typing import Any, Protocol

from saguaro_core.bench_measure import BenchPlan, DecodingEngine, Measurement, measure
from saguaro_core.bench_options import Command, read_command
from saguaro_core.bench_report import summarise
from saguaro_core.bench_table import format_report
from saguaro_core.bench_terminal import StatusLine, exit_status, say
from saguaro_core.config import EngineConfig
from saguaro_core.engine import Engine
from saguaro_core.errors import ModelError
from saguaro_core.status import EngineInfo, EngineStatus


class BenchEngine(DecodingEngine, Protocol):
    """The engine's client, as far as the command line uses it."""

    def start(self) -> None: ...
    def wait_ready(self, timeout: float | None = None) -> EngineInfo: ...
    def close(self) -> None: ...


EngineFactory = Callable[[EngineConfig, Callable[[EngineStatus], None]], BenchEngine]


def start_engine(config: EngineConfig, on_status: Callable[[EngineStatus], None]) -> BenchEngine:
    """The real engine, in its own processes."""
    return Engine(config, on_status=on_status)


def main(arguments: Sequence[str] | None = None, make_engine: EngineFactory = start_engine) -> int:
    """Run the command line and return its exit status; argparse exits by itself with status 2."""
    command = read_command(arguments)
    return exit_status(lambda: _measure_and_print(command, make_engine))


def _measure_and_print(command: Command, make_engine: EngineFactory) -> None:
    with closing(make_engine(command.config, StatusLine())) as engine:
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
    say("warming up", end="")
    for measurement in measure(engine, plan):
        measurements.append(measurement)
        speed = measurement.figures.decode_tokens_per_second
        shown = "n/a" if speed is None else f"{speed:.1f} tokens/s"
        count = f"run {len(measurements)} of {plan.num_runs}"
        say(f"\r{count}: prompt {measurement.prompt + 1}, {measurement.mode}, {shown}".ljust(70), end="")
    say("\n")
    return measurements


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
