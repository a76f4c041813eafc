"""Measures AR, SD and SSD on this machine and prints one table: python -m saguaro_core.bench --help.

Standard output carries the table only; progress and errors go to standard error. Exit status: 0 measured, 1 a run
failed, 2 the arguments cannot be used, 130 interrupted.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from typing import Any

from saguaro_core.bench_app import measure_app_memory
from saguaro_core.bench_batch import measure_batches
from saguaro_core.bench_engine import EngineFactory, all_cores, require_draft, start_engine, start_pair
from saguaro_core.bench_measure import AR_ALL_CORES, BenchPlan, DecodingEngine, Measurement, measure
from saguaro_core.bench_memory import MemoryFigures, format_memory, read_memory
from saguaro_core.bench_options import Command, read_command
from saguaro_core.bench_profile import profile
from saguaro_core.bench_report import summarise
from saguaro_core.bench_stretch import stretched_target
from saguaro_core.bench_table import format_report
from saguaro_core.bench_terminal import exit_status, say
from saguaro_core.peers.compare import compare_peers
from saguaro_core.peers.report import format_peers, peers_to_json
from saguaro_core.peers.rows import own_speeds
from saguaro_core.status import EngineInfo


def main(arguments: Sequence[str] | None = None, make_engine: EngineFactory = start_engine) -> int:
    """Run the command line and return its exit status; argparse exits by itself with status 2."""
    command = read_command(arguments)
    return exit_status(lambda: _work(command, make_engine))


def _work(command: Command, make_engine: EngineFactory) -> None:
    if command.stretching is not None:
        folder = stretched_target(command.stretching, on_progress=lambda message, share: say(message))
        command = replace(command, config=replace(command.config, target=str(folder)))
    match command.work:
        case "measure":
            _measure_and_print(command, make_engine)
        case "profile":
            _show(command, *profile(command.plan, command.config))
        case "batches":
            _show(command, *measure_batches(command.plan, command.batch_sizes, command.config, make_engine))
        case "memory":
            _show(command, *measure_app_memory(command.config))


def _show(command: Command, text: str, data: dict[str, Any]) -> None:
    sys.stdout.write(text)
    _write(command, data)


def _write(command: Command, data: dict[str, Any]) -> None:
    if command.json_file is not None:
        command.json_file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _measure_and_print(command: Command, make_engine: EngineFactory) -> None:
    plan = command.plan
    with ExitStack() as stack:
        engine, info = start_pair(stack, command.config, make_engine)
        if set(plan.modes) != {"ar"}:
            require_draft(info, "only --modes ar can run")
        engines: dict[str, DecodingEngine] = dict.fromkeys(plan.columns, engine)
        if plan.ar_all_cores:
            config = replace(command.config, placement=all_cores(info))
            engines[AR_ALL_CORES], _ = start_pair(stack, config, make_engine)
        measurements = _measure_all(engines, plan)
        memory = read_memory(engine.process_id())
    report = summarise(measurements, command.plan.prompts)
    details = _details(command, info, memory)
    sys.stdout.write("\n".join([format_report(report), *_about_pair(command), *format_memory(memory)]) + "\n")
    if command.peers is not None:
        held = None if memory is None else memory.peak_rss_bytes
        comparison = compare_peers(own_speeds(measurements, held), plan, command.config, info, command.peers, say)
        sys.stdout.write("\n" + format_peers(comparison))
        details["peers"] = peers_to_json(comparison)
    _write(command, report.to_json(details))


def _measure_all(engines: Mapping[str, DecodingEngine], plan: BenchPlan) -> list[Measurement]:
    measurements: list[Measurement] = []
    say("warming up", end="")
    for measurement in measure(engines, plan):
        measurements.append(measurement)
        speed = measurement.figures.decode_tokens_per_second
        shown = "n/a" if speed is None else f"{speed:.1f} tokens/s"
        count = f"run {len(measurements)} of {plan.num_runs}"
        say(f"\r{count}: prompt {measurement.prompt + 1}, {measurement.column}, {shown}".ljust(70), end="")
    say("\n")
    return measurements


def _about_pair(command: Command) -> list[str]:
    if command.stretching is None:
        return []
    noise = command.stretching.noise
    return [f"pair: stretch, a fixture of this benchmark (padded and perturbed by {noise:g}), no model to talk to"]


def _details(command: Command, info: EngineInfo, memory: MemoryFigures | None) -> dict[str, Any]:
    plan = command.plan
    return {
        "pair": None if command.stretching is None else {"name": "stretch", **asdict(command.stretching)},
        "memory": None if memory is None else memory.to_json(),
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
