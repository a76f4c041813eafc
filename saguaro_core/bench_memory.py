"""How much memory processes hold, read from /proc: only Linux tells, elsewhere the figures are n/a.

Two measures are given. Peak resident is what the kernel remembers of each process (VmHWM); summed over processes it
counts a shared page once for each. Proportional (PSS) divides a shared page among its users, so its sum is what the
processes hold together; the kernel keeps no peak of it, so a peak is the largest of many samples.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_PROC = Path("/proc")
_NAMES = {"saguaro_core.server": "engine", "saguaro_core.draft.process": "draft", "app.py": "app"}
_SAMPLE_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """One process: what it is, the most that was ever resident, and its proportional share now. Bytes."""

    name: str
    peak_rss_bytes: int
    pss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """A process and all its children. `peak_pss_bytes` is the largest sum of a sampled stretch, None without one."""

    processes: tuple[ProcessMemory, ...]
    peak_pss_bytes: int | None = None

    @property
    def peak_rss_bytes(self) -> int:
        """The sum of the peaks, in which shared pages count once for each process: an upper bound."""
        return sum(process.peak_rss_bytes for process in self.processes)

    @property
    def pss_bytes(self) -> int:
        """What the processes hold together now."""
        return sum(process.pss_bytes for process in self.processes)

    def to_json(self) -> dict[str, Any]:
        """Plain data with the sums."""
        sums = {"peak_rss_bytes": self.peak_rss_bytes, "pss_bytes": self.pss_bytes}
        return {**sums, "peak_pss_bytes": self.peak_pss_bytes, "processes": [asdict(p) for p in self.processes]}


def read_memory(process_id: int | None) -> MemoryFigures | None:
    """A process and its children now, the process itself first; None where the system does not tell."""
    if process_id is None:
        return None
    found = [memory for pid in process_tree(process_id) if (memory := _read_process(pid)) is not None]
    return MemoryFigures(processes=tuple(found)) if found else None


def process_tree(process_id: int) -> list[int]:
    """The process and everything that descends from it, parents first; empty where the system does not tell."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    tree = [process_id] if _PROC.joinpath(str(process_id), "status").exists() else []
    for pid in tree:  # Grows while it is walked.
        tree += children.get(pid, [])
    return tree


def _parents() -> Iterator[tuple[int, int]]:
    for path in _PROC.glob("[0-9]*/status"):
        with suppress(OSError, KeyError, ValueError):
            yield int(path.parent.name), int(_fields(path)["PPid"])


def _read_process(pid: int) -> ProcessMemory | None:
    """None for a process that has just ended, or belongs to somebody else."""
    folder = _PROC / str(pid)
    try:
        words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        peak, pss = _fields(folder / "status")["VmHWM"], _fields(folder / "smaps_rollup")["Pss"]
    except (OSError, KeyError):
        return None
    name = next((name for end, name in _NAMES.items() if any(word.endswith(end) for word in words)), words[0])
    return ProcessMemory(name=name, peak_rss_bytes=_bytes(peak), pss_bytes=_bytes(pss))


def _fields(path: Path) -> dict[str, str]:
    """The `Name: value` lines of a file."""
    lines = (line.partition(":") for line in path.read_text(errors="replace").splitlines())
    return {name: value.strip() for name, colon, value in lines if colon}


def _bytes(text: str) -> int:
    return 1024 * int(text.removesuffix("kB"))


@dataclass(slots=True)
class PeakSampler:
    """Samples a process tree while its block runs. Reading PSS disturbs the processes: time nothing meanwhile."""

    process_id: int
    peak_pss_bytes: int | None = None
    _last: MemoryFigures | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def figures(self) -> MemoryFigures | None:
        """The last state of every process, and the largest sum that was seen."""
        return None if self._last is None else replace(self._last, peak_pss_bytes=self.peak_pss_bytes)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._sample, name="memory-sampler", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _sample(self) -> None:
        while not self._stop.is_set():
            started = time.monotonic()
            memory = read_memory(self.process_id)
            if memory is not None:
                self._last, self.peak_pss_bytes = memory, max(self.peak_pss_bytes or 0, memory.pss_bytes)
            self._stop.wait(max(_SAMPLE_SECONDS, time.monotonic() - started))


def format_memory(memory: MemoryFigures | None) -> list[str]:
    """Lines for a table: each process, then the sums and what they count."""
    if memory is None:
        return ["memory: n/a (only Linux tells what a process holds)"]
    each = ", ".join(f"{process.name} {_megabytes(process.peak_rss_bytes)}" for process in memory.processes)
    lines = [
        f"memory: peak resident {each}; sum {_megabytes(memory.peak_rss_bytes)} (a shared page counts in each)",
        f"memory: {_megabytes(memory.pss_bytes)} together at the end (PSS: a shared page counts once)",
    ]
    if memory.peak_pss_bytes is not None:
        peak = _megabytes(memory.peak_pss_bytes)
        lines.append(f"memory: {peak} together at the peak (PSS, sampled about every {_SAMPLE_SECONDS:g} s)")
    return lines


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB"
