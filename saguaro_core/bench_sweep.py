"""Sweeps one setting over a loaded pair and prints a table: python -m saguaro_core.bench_sweep --help.

Standard output carries the table only. Interrupted, it shows the points that were measured. Exit status: 0 measured,
1 a run failed, 2 the arguments cannot be used, 130 interrupted.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from saguaro_core.bench_engine import EngineFactory, require_draft, start_engine, start_pair
from saguaro_core.bench_measure import Measurement
from saguaro_core.bench_options import require_between, require_writable
from saguaro_core.bench_sweep_fan_out import FanOutSweep
from saguaro_core.bench_sweep_kinds import FallbackSweep, LookaheadSweep, SaguaroSweep
from saguaro_core.bench_sweep_run import Runs, Sweep, SweepPlan, SweepPoint, points_to_json, run_points, warm_up
from saguaro_core.bench_terminal import INTERRUPTED, exit_status, say
from saguaro_core.config import EngineConfig, Placement, SamplingParams, SpeculationConfig
from saguaro_core.errors import InvalidRequest
from saguaro_core.prompts import PROMPTS, select_prompts

SWEEPS: Mapping[str, Sweep] = {
    "fan-out": FanOutSweep(),
    "c": SaguaroSweep(),
    "lookahead": LookaheadSweep(),
    "fallback": FallbackSweep(),
}
_SAMPLED = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCommand:
    """What the arguments ask for, checked."""

    kind: str
    plan: SweepPlan
    config: EngineConfig
    json_file: Path | None

    @property
    def sweep(self) -> Sweep:
        return SWEEPS[self.kind]


def main(arguments: Sequence[str] | None = None, make_engine: EngineFactory = start_engine) -> int:
    """Run the command line and return its exit status; argparse exits by itself with status 2."""
    parser = _parser()
    try:
        command = _command(parser.parse_args(arguments))
    except InvalidRequest as error:
        parser.error(str(error))
    runs: Runs = {}
    status = exit_status(lambda: _measure(command, make_engine, runs))
    if status == 0 or (status == INTERRUPTED and runs):
        _show(command, runs, is_whole=status == 0)
    return status


def _parser() -> argparse.ArgumentParser:
    speculation, engine = SpeculationConfig(), EngineConfig()
    parser = argparse.ArgumentParser(
        prog="python -m saguaro_core.bench_sweep", description="Sweep one setting of SSD over a loaded pair."
    )
    add = parser.add_argument
    add("kind", choices=SWEEPS, help="what is varied")
    add("--prompts", type=int, default=4, help="how many prompts, the four kinds in turn (%(default)s)")
    add("--max-new-tokens", type=int, default=48, help="tokens per answer (%(default)s)")
    add("--temperature", type=float, help=f"0, greedy, to 2 (0; for c {_SAMPLED:g})")
    add("--rule", help="shared_noise or rejection (shared_noise; for c rejection)")
    add("--seed", type=int, default=0, help="of the noise at temperatures above 0 (%(default)s)")
    add("--lookahead", type=int, default=speculation.lookahead, help="K, where it is not varied (%(default)s)")
    add("--budget", type=int, default=speculation.budget, help="B, where it is not varied (%(default)s)")
    add("--target", default=engine.target, help="catalogue name, hub id or folder (%(default)s)")
    add("--draft", default=engine.draft, help="catalogue name, hub id or folder (%(default)s)")
    add("--placement", default="auto", help="auto, or target=DEVICE,draft=DEVICE (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the figures of every point there")
    return parser


def _command(options: argparse.Namespace) -> SweepCommand:
    """Check everything before an engine is started. Raises InvalidRequest."""
    is_sampled = options.kind == "c"
    temperature = options.temperature if options.temperature is not None else _SAMPLED if is_sampled else 0.0
    rule: Any = options.rule if options.rule is not None else "rejection" if is_sampled else "shared_noise"
    require_between("prompts", options.prompts, 1, len(PROMPTS))
    require_writable(options.json)
    plan = SweepPlan(
        prompts=select_prompts(options.prompts),
        sampling=SamplingParams(temperature=temperature, seed=options.seed, max_new_tokens=options.max_new_tokens),
        speculation=SpeculationConfig(lookahead=options.lookahead, budget=options.budget, rule=rule),
    )
    SWEEPS[options.kind].check(plan)
    config = EngineConfig(target=options.target, draft=options.draft, placement=Placement.parse(options.placement))
    return SweepCommand(kind=options.kind, plan=plan, config=config, json_file=options.json)


def _measure(command: SweepCommand, make_engine: EngineFactory, runs: Runs) -> None:
    """Fill `runs`, stage by stage."""
    with ExitStack() as stack:
        engine, info = start_pair(stack, command.config, make_engine)
        require_draft(info, "there is nothing to sweep")
        say("warming up", end="")
        is_warm = False
        for points in command.sweep.stages(command.plan, runs):
            if not is_warm:
                warm_up(engine, command.plan, dict.fromkeys(point.mode for point in points))
                is_warm = True
            run_points(engine, command.plan, points, runs, _Progress(len(points) * len(command.plan.prompts)))
    say("\n")


class _Progress:
    """Counts the runs of a stage on one line."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0

    def __call__(self, point: SweepPoint, measurement: Measurement) -> None:
        self._done += 1
        say(f"\rrun {self._done} of {self._total}: prompt {measurement.prompt + 1}, {point.name}".ljust(70), end="")


def _show(command: SweepCommand, runs: Runs, *, is_whole: bool) -> None:
    report = command.sweep.report(command.plan, runs)
    lines = [*report.lines] if is_whole else [*report.lines, "", "interrupted: not all prompts ran at all points"]
    sys.stdout.write("\n".join(lines) + "\n")
    if command.json_file is not None:
        data = {**_details(command), "is_whole": is_whole, "points": points_to_json(runs), **report.data}
        command.json_file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _details(command: SweepCommand) -> dict[str, Any]:
    plan, config = command.plan, command.config
    return {
        "sweep": command.kind,
        "num_prompts": len(plan.prompts),
        "sampling": asdict(plan.sampling),
        "speculation": asdict(plan.speculation),
        "target": config.target,
        "draft": config.draft,
        "placement": asdict(config.placement),
    }


if __name__ == "__main__":
    sys.exit(main())
