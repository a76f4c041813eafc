"""How a profiled process hands its sums over: one JSON line for each run, in a folder named by the environment."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self, TypeVar

from saguaro_core.bench_sections import SectionClock, Total

Key = TypeVar("Key", int, str)

FOLDER_VARIABLE = "SAGUARO_PROFILE_FOLDER"


@dataclass(frozen=True, slots=True)
class Profile:
    """Sums of one process over some runs: by label, in order of first use, and by the rows of a forward."""

    totals: dict[str, Total]
    forwards: dict[int, Total]

    @classmethod
    def sum(cls, profiles: Iterable[Self]) -> Self:
        """Several runs as one."""
        totals: dict[str, Total] = {}
        forwards: dict[int, Total] = {}
        for profile in profiles:
            _add(totals, profile.totals)
            _add(forwards, profile.forwards)
        return cls(totals, forwards)


def _add(sums: dict[Key, Total], more: dict[Key, Total]) -> None:
    for key, total in more.items():
        known = sums.setdefault(key, Total())
        known.seconds += total.seconds
        known.calls += total.calls


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """The file of one process."""

    path: Path

    @classmethod
    def of_process(cls, name: str) -> Self:
        """The file that a profiled process writes to."""
        return cls(Path(os.environ[FOLDER_VARIABLE]) / f"{name}.jsonl")

    def write(self, clock: SectionClock) -> None:
        """Append what the clock has summed over one run."""
        data = {
            "totals": {label: asdict(total) for label, total in clock.totals.items()},
            "forwards": {rows: asdict(total) for rows, total in clock.forwards.items()},
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(data) + "\n")

    def read(self) -> list[Profile]:
        """The runs in order."""
        lines = [json.loads(line) for line in self.path.read_text("utf-8").splitlines()]
        return [
            Profile(
                {label: Total(**total) for label, total in line["totals"].items()},
                {int(rows): Total(**total) for rows, total in line["forwards"].items()},
            )
            for line in lines
        ]
