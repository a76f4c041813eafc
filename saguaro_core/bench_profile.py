"""Where the time of an SSD round goes: the milliseconds of each part, target and draft side by side.

The real engine and the real draft process run with timers around their parts. The timers cost some microseconds for
each call, so speeds are measured without them.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from saguaro_core.bench_engine import require_draft, start_pair
from saguaro_core.bench_measure import BenchPlan, measure
from saguaro_core.bench_profile_file import FOLDER_VARIABLE, Profile, ProfileFile
from saguaro_core.bench_sections import Total
from saguaro_core.bench_terminal import say
from saguaro_core.config import EngineConfig
from saguaro_core.engine import Engine, StatusListener

TARGET_MODULE = "saguaro_core.bench_profile_target"
# The label that is entered once a round, on either side.
ROUND_LABELS = {"target": "commit the tokens", "draft": "answer: look up"}
MIN_ROUNDS = 50
_SHOWN_MS = 0.005
_LABEL_WIDTH, _NUMBER_WIDTH = 34, 9


def profile(plan: BenchPlan, config: EngineConfig) -> tuple[str, dict[str, Any]]:
    """The table and the JSON data of the plan's prompts in mode SSD. Raises SaguaroError."""
    plan = replace(plan, modes=("ssd",), ar_all_cores=False)
    with tempfile.TemporaryDirectory(prefix="saguaro-profile-") as folder:
        with ExitStack() as stack:
            stack.enter_context(_environment(FOLDER_VARIABLE, folder))
            engine, info = start_pair(stack, config, _start_profiled)
            require_draft(info, "there is no SSD round to profile")
            for number, _ in enumerate(measure({"ssd": engine}, plan), 1):
                say(f"\rrun {number} of {plan.num_runs}", end="")
            say("\n")
        profiles = {name: _read(Path(folder), name) for name in ROUND_LABELS}
    return format_profile(profiles), profile_to_json(profiles)


def _start_profiled(config: EngineConfig, on_status: StatusListener) -> Engine:
    return Engine(config, on_status=on_status, module=TARGET_MODULE)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable for the processes that are started meanwhile."""
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _read(folder: Path, name: str) -> Profile:
    _warm_up, *runs = ProfileFile(folder / f"{name}.jsonl").read()
    return Profile.sum(runs)


def format_profile(profiles: Mapping[str, Profile]) -> str:
    """Both sides as columns: milliseconds per round and share of the round, the longest parts first."""
    columns = [_column(name, profile) for name, profile in profiles.items()]
    width = _LABEL_WIDTH + 2 * _NUMBER_WIDTH + 3
    lines = ["".join(cell.ljust(width) for cell in row).rstrip() for row in zip_longest(*columns, fillvalue="")]
    num_rounds = min(rounds_of(name, profile) for name, profile in profiles.items())
    if num_rounds < MIN_ROUNDS:
        lines.append(f"only {num_rounds} rounds: give more --prompts or --max-new-tokens for a mean to rely on.")
    return "\n".join([*lines, "", *_forward_lines(profiles)]) + "\n"


def rounds_of(name: str, profile: Profile) -> int:
    """How many rounds a profile covers."""
    total = profile.totals.get(ROUND_LABELS[name])
    return 0 if total is None else total.calls


def _column(name: str, profile: Profile) -> list[str]:
    rounds = max(1, rounds_of(name, profile))
    per_round = {label: 1000.0 * total.seconds / rounds for label, total in profile.totals.items()}
    whole = sum(per_round.values())
    parts = sorted(per_round.items(), key=lambda part: -part[1])
    shown = [_cells(label, f"{ms:.2f}", f"{ms / whole:.0%}") for label, ms in parts if ms >= _SHOWN_MS]
    head = _cells(f"{name}, mean of {rounds_of(name, profile)} rounds", "ms", "share")
    return [head, *shown, _cells("whole round", f"{whole:.2f}", "")]


def _cells(label: str, *numbers: str) -> str:
    return label.ljust(_LABEL_WIDTH) + "".join(number.rjust(_NUMBER_WIDTH) for number in numbers)


def _forward_lines(profiles: Mapping[str, Profile]) -> list[str]:
    """Mean time of a forward by its rows, and how many a round has."""
    lines = []
    for name, profile in profiles.items():
        rounds = max(1, rounds_of(name, profile))
        for rows in sorted(profile.forwards):
            total = profile.forwards[rows]
            mean = 1000.0 * total.seconds / total.calls
            lines.append(f"{name}, forward of {rows} rows: {mean:.2f} ms, {total.calls / rounds:.2f} a round")
    return lines


def profile_to_json(profiles: Mapping[str, Profile]) -> dict[str, Any]:
    """For each side: rounds, and seconds and calls by label and by the rows of a forward."""
    return {
        "profile": {
            name: {
                "num_rounds": rounds_of(name, profile),
                "parts": _plain(profile.totals),
                "forwards_by_rows": _plain(profile.forwards),
            }
            for name, profile in profiles.items()
        }
    }


def _plain(totals: Mapping[Any, Total]) -> dict[str, dict[str, float]]:
    return {str(key): asdict(total) for key, total in totals.items()}
