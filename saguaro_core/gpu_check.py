"""Checks all that only a GPU can show, in one run of under five minutes: python -m saguaro_core.gpu_check --help.

Standard output carries one table; progress and errors go to standard error. On GPUs every check runs in a process of
its own with a time limit, so one that hangs or breaks the device's context takes no other along. Exit status: 0 nothing
failed, 1 a check failed, 2 the arguments cannot be used or no GPU is here, 130 interrupted.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from saguaro_core.checks.rows import Row, Setting, format_table, reported_in
from saguaro_core.gpu_check_compile import check_compile
from saguaro_core.gpu_check_distribution import check_distribution
from saguaro_core.gpu_check_equality import check_equality
from saguaro_core.gpu_check_forwards import check_forwards
from saguaro_core.gpu_check_placement import check_placement
from saguaro_core.gpu_check_rounds import check_rounds
from saguaro_core.models.build import hardware_name, software_versions

_TOTAL_SECONDS = 290.0
_MOST_DEVICES = 2


@dataclass(frozen=True, slots=True)
class Check:
    """What gives rows, and how many seconds it may take on a GPU."""

    run: Callable[[Setting], list[Row]]
    seconds: float


CHECKS: Mapping[str, Check] = {
    "placement": Check(check_placement, 45),
    "equality": Check(check_equality, 120),
    "distribution": Check(check_distribution, 80),
    "compile": Check(check_compile, 60),
    "forwards": Check(check_forwards, 70),
    "rounds": Check(check_rounds, 80),
}


def main(arguments: Sequence[str] | None = None, checks: Mapping[str, Check] = CHECKS) -> int:
    """Run the command line and return its exit status; argparse exits by itself with status 2."""
    parser = _parser(checks)
    options = parser.parse_args(arguments)
    names = list(checks) if options.only is None else options.only.split(",")
    unknown = [name for name in names if name not in checks]
    if unknown:
        parser.error(f"only is {options.only!r}: the checks are {', '.join(checks)}.")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"json is {str(options.json)!r}: give a file in a folder that exists.")
    devices = _devices(options.device)
    if not devices:
        parser.error("no CUDA device is here. --device cpu --tiny runs the same checks on the CPU, as a rehearsal.")
    setting = Setting(devices, options.tiny)
    started = time.monotonic()
    try:
        rows = _run_all(names, setting, checks, is_isolated=setting.is_cuda and options.only is None)
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    _report(rows, setting, time.monotonic() - started, options.json)
    return 1 if any(row.result == "failed" for row in rows) else 0


def _parser(checks: Mapping[str, Check]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m saguaro_core.gpu_check", description="Check and measure the engine on this machine's GPUs."
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu stands in where no GPU is (%(default)s)")
    add("--tiny", action="store_true", help="tiny models and few runs: shows that the command works, measures nothing")
    add("--only", metavar="NAMES", help=f"some of {','.join(checks)}, in this process (all, each in its own)")
    add("--json", type=Path, metavar="FILE", help="write the rows and their numbers there")
    return parser


def _devices(kind: str) -> tuple[str, ...]:
    if kind == "cpu":
        return ("cpu",)
    return tuple(f"cuda:{index}" for index in range(min(torch.cuda.device_count(), _MOST_DEVICES)))


def _run_all(names: Sequence[str], setting: Setting, checks: Mapping[str, Check], *, is_isolated: bool) -> list[Row]:
    """Every check's rows, whatever becomes of the others."""
    rows: list[Row] = []
    deadline = time.monotonic() + _TOTAL_SECONDS
    for number, name in enumerate(names, 1):
        _say(f"{number} of {len(names)}: {name}")
        if is_isolated:
            seconds = min(checks[name].seconds, deadline - time.monotonic())
            rows += run_isolated(name, _command(name, setting), seconds)
        else:
            with reported_in(rows, name):
                rows += checks[name].run(setting)
    return rows


def _command(name: str, setting: Setting) -> list[str]:
    device = setting.first.partition(":")[0]
    command = [sys.executable, "-m", "saguaro_core.gpu_check", "--device", device, "--only", name]
    return [*command, "--tiny"] if setting.is_tiny else command


def run_isolated(name: str, command: Sequence[str], seconds: float) -> list[Row]:
    """The rows of a check that runs as a process of its own, which is ended when its time is up.

    What it started ends with it: every process of ours lives no longer than its parent.
    """
    if seconds <= 0:
        return [Row(name, "failed", f"not started: the checks before it took all of {_TOTAL_SECONDS:g} s")]
    with tempfile.TemporaryDirectory(prefix="saguaro-") as folder:
        answer = Path(folder, "rows.json")
        try:
            ended = subprocess.run(
                [*command, "--json", str(answer)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return [Row(name, "failed", f"did not end within {seconds:.0f} s, and was ended")]
        if not answer.exists():
            return [Row(name, "failed", f"its process ended with exit status {ended.returncode}, see above")]
        return [Row(**row) for row in json.loads(answer.read_text("utf-8"))["rows"]]


def _report(rows: Sequence[Row], setting: Setting, seconds: float, json_file: Path | None) -> None:
    counts = Counter(row.result for row in rows)
    ended = ", ".join(f"{counts[result]} {result}" for result in ("passed", "failed", "skipped", "measured"))
    sys.stdout.write(f"{format_table(rows)}\n{ended}, in {seconds:.0f} s; {_where(setting)}\n")
    if json_file is not None:
        data = _details(setting, seconds) | {"rows": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _where(setting: Setting) -> str:
    if setting.is_cuda:
        return f"{hardware_name()}, {setting.places}"
    return f"on the CPU, which stands in for a GPU: no time above is one of a GPU's ({hardware_name()})"


def _details(setting: Setting, seconds: float) -> dict[str, Any]:
    return {
        "devices": setting.devices,
        "is_tiny": setting.is_tiny,
        "hardware": hardware_name(),
        "versions": software_versions(),
        "seconds": seconds,
    }


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
