"""Decides where target and draft run: devices, and on CPUs disjoint sets of cores."""

import contextlib
import os
import sys
from dataclasses import dataclass

import torch

from saguaro_core.config import Placement
from saguaro_core.errors import InvalidRequest

# More draft cores than this help a small model little; the target is the one bound by memory.
_MOST_DRAFT_CORES = 4


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """One model's place: `devices` (several: sharded over them) and, on the CPU, the cores of its thread pool."""

    devices: tuple[str, ...]
    cores: tuple[int, ...] = ()

    @property
    def is_cpu(self) -> bool:
        return self.devices == ("cpu",)

    @property
    def first(self) -> str:
        return self.devices[0]

    def describe(self) -> str:
        """As written on the command line; cores with gaps between them, which cannot be written there, are listed."""
        if not self.is_cpu:
            return "+".join(self.devices)
        if not self.cores:
            return "cpu"
        first, last = self.cores[0], self.cores[-1]
        if self.cores != tuple(range(first, last + 1)):
            return "cpu:" + ",".join(map(str, self.cores))
        return f"cpu:{first}" if first == last else f"cpu:{first}-{last}"


@dataclass(frozen=True, slots=True)
class ResolvedPlacement:
    """Where both models run; `notes` say what limits the overlap."""

    target: DevicePlan
    draft: DevicePlan
    notes: tuple[str, ...] = ()

    @property
    def num_devices(self) -> int:
        """Places that can work at the same time: the target's, however many devices it is sharded over, and the
        draft's.
        """
        return 1 if self.target == self.draft else 2


def resolve_placement(placement: Placement) -> ResolvedPlacement:
    """Turn a request for places into devices and cores of this machine. Raises InvalidRequest for what is not there."""
    cores = available_cores()
    target_wish, draft_wish = _automatic(placement)
    target = _plan(target_wish)
    draft = _plan(draft_wish)
    if target.is_cpu and draft.is_cpu:
        target, draft = _split_cores(target, draft, cores)
    elif target.is_cpu or draft.is_cpu:
        target, draft = (DevicePlan(p.devices, p.cores or cores) if p.is_cpu else p for p in (target, draft))
    return ResolvedPlacement(target, draft, tuple(_notes(target, draft)))


def available_cores() -> tuple[int, ...]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def occupy(plan: DevicePlan) -> None:
    """Give this process its cores: pinned where the system allows it, and one thread for each."""
    if not plan.is_cpu or not plan.cores:
        return
    if sys.platform == "linux":
        # Linux pins threads, not processes: those of the link are there already.
        for thread_id in map(int, os.listdir("/proc/self/task")):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread_id, plan.cores)
    torch.set_num_threads(len(plan.cores))


def _automatic(placement: Placement) -> tuple[str, str]:
    """Fill in `auto` from what is there."""
    num_cuda = torch.cuda.device_count()
    if num_cuda > 1:
        shards = "+".join(f"cuda:{i}" for i in range(num_cuda - 1))
        target, draft = shards, f"cuda:{num_cuda - 1}"
    elif num_cuda == 1:
        target = draft = "cuda:0"
    elif torch.backends.mps.is_available():
        target, draft = "mps", "cpu"
    else:
        target = draft = "cpu"
    target = target if placement.target == "auto" else placement.target
    return target, draft if placement.draft == "auto" else placement.draft


def _plan(wish: str) -> DevicePlan:
    """Read `cpu`, `cpu:0-3`, `cuda:0`, `cuda:0+cuda:1` or `mps`."""
    kind, _, detail = wish.partition(":")
    if kind == "cpu":
        return DevicePlan(("cpu",), _cores(wish, detail) if detail else ())
    return DevicePlan(tuple(_checked(device) for device in wish.split("+")))


def _checked(device: str) -> str:
    """The device by its full name (`cuda` is `cuda:0`). Raises InvalidRequest if it is not here."""
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise InvalidRequest(f"device is {device!r}: write cpu, cpu:0-3, cuda:0, cuda:0+cuda:1 or mps.") from error
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise InvalidRequest(
            f"device is {device!r}: {torch.cuda.device_count()} CUDA devices are here, counted from 0."
        )
    if parsed.type == "mps" and not torch.backends.mps.is_available():
        raise InvalidRequest(f"device is {device!r}: Apple MPS is not available here; use cpu.")
    if parsed.type not in ("cuda", "mps"):
        raise InvalidRequest(f"device is {device!r}: cpu, cuda and mps are supported.")
    return f"cuda:{parsed.index or 0}" if parsed.type == "cuda" else device


def _cores(wish: str, detail: str) -> tuple[int, ...]:
    first, _, last = detail.partition("-")
    try:
        cores = tuple(range(int(first), int(last or first) + 1))
    except ValueError as error:
        raise InvalidRequest(f"cores are {wish!r}: write cpu:2 or cpu:0-3.") from error
    missing = sorted(set(cores) - set(available_cores()))
    if missing or not cores:
        raise InvalidRequest(f"cores are {wish!r}: this process may use {list(available_cores())}.")
    return cores


def _split_cores(target: DevicePlan, draft: DevicePlan, cores: tuple[int, ...]) -> tuple[DevicePlan, DevicePlan]:
    """Disjoint cores for both models where there are at least two: the draft takes a quarter, the target the rest."""
    free = tuple(core for core in cores if core not in (*target.cores, *draft.cores)) or cores
    if target.cores and draft.cores:
        return target, draft
    if target.cores or draft.cores:
        return tuple(DevicePlan(p.devices, p.cores or free) for p in (target, draft))  # type: ignore[return-value]
    if len(cores) == 1:
        return DevicePlan(("cpu",), cores), DevicePlan(("cpu",), cores)
    num_draft = min(_MOST_DRAFT_CORES, max(1, len(cores) // 4))
    return DevicePlan(("cpu",), cores[:-num_draft]), DevicePlan(("cpu",), cores[-num_draft:])


def _notes(target: DevicePlan, draft: DevicePlan) -> list[str]:
    if target.is_cpu and draft.is_cpu:
        shared = sorted(set(target.cores) & set(draft.cores))
        return [f"Target and draft share the cores {shared}: overlap is limited."] if shared else []
    if set(target.devices) & set(draft.devices):
        return ["Target and draft share one device: overlap is limited."]
    return []
