"""What the engine process says about itself: load progress, then what is loaded where."""

from dataclasses import dataclass
from typing import Literal

EngineState = Literal["starting", "loading", "ready", "failed", "closed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """One loaded model. `memory_bytes` counts its weights as held; `note` says what is unusual about it.

    `cores` are those of its thread pool when it runs on the CPU.
    """

    name: str
    revision: str
    dtype: str
    device: str
    num_parameters: int
    vocabulary_size: int
    context_length: int
    memory_bytes: int
    note: str = ""
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The pair, its placement and the machine. `draft` is None and `draft_error` says why when only AR can run.

    `num_devices` counts the places that can work at the same time; a target sharded over several devices is one.
    """

    target: ModelInfo
    draft: ModelInfo | None
    draft_error: str | None
    context_length: int
    num_devices: int
    hardware: str
    versions: dict[str, str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """A step of the engine's life; `progress` is 0..1 within the current step where it is known."""

    state: EngineState
    message: str
    progress: float | None = None
    info: EngineInfo | None = None
