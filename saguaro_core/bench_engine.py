"""The engine as the benchmark's commands start it: a loaded pair that ends with the command."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from typing import Protocol

from saguaro_core.bench_measure import DecodingEngine
from saguaro_core.bench_terminal import StatusLine
from saguaro_core.config import EngineConfig, GenerationRequest, Placement
from saguaro_core.engine import Engine
from saguaro_core.errors import ModelError
from saguaro_core.events import Event
from saguaro_core.status import EngineInfo, EngineStatus


class BenchEngine(DecodingEngine, Protocol):
    """The engine's client, as far as the command line uses it."""

    def start(self) -> None: ...
    def wait_ready(self, timeout: float | None = None) -> EngineInfo: ...
    def process_id(self) -> int | None: ...
    def submit_batch(self, requests: Mapping[str, GenerationRequest], on_event: Callable[[Event], None]) -> None: ...
    def close(self) -> None: ...


EngineFactory = Callable[[EngineConfig, Callable[[EngineStatus], None]], BenchEngine]


def start_engine(config: EngineConfig, on_status: Callable[[EngineStatus], None]) -> BenchEngine:
    """The real engine, in its own processes."""
    return Engine(config, on_status=on_status)


def start_pair(
    stack: ExitStack, config: EngineConfig, make_engine: EngineFactory = start_engine
) -> tuple[BenchEngine, EngineInfo]:
    """A loaded pair, which ends with the stack. Raises ModelError with the reason when it cannot be loaded."""
    engine = stack.enter_context(closing(make_engine(config, StatusLine())))
    engine.start()
    return engine, engine.wait_ready()


def require_draft(info: EngineInfo, what: str) -> None:
    """Raise ModelError with the reason when there is no draft."""
    if info.draft is None:
        raise ModelError(f"no draft is loaded, so {what}: {info.draft_error}")


def all_cores(info: EngineInfo) -> Placement:
    """AR's place with the cores of target and draft together. Raises ModelError where it cannot be written."""
    cores = sorted({*info.target.cores, *(info.draft.cores if info.draft is not None else ())})
    if not info.target.cores or cores != list(range(cores[0], cores[-1] + 1)):
        raise ModelError(
            f"--ar-all-cores needs a pair on neighbouring CPU cores; this target has {list(info.target.cores)}."
        )
    place = f"cpu:{cores[0]}-{cores[-1]}"
    return Placement(target=place, draft=place)
