"""What waits in the recorder's queue: a run's events and the few commands around them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from saguaro_core.config import GenerationRequest, Message
from saguaro_core.events import Notice, RoundEvent, RunFinished, RunStarted, SpanEvent, TokenEvent
from saguaro_core.status import EngineInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class StartComparison:
    comparison_id: str
    messages: tuple[Message, ...]
    settings: Mapping[str, Any]
    title: str | None
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRun:
    run_id: str
    comparison_id: str
    request: GenerationRequest
    info: EngineInfo
    queued_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedEvent:
    """A span or a notice with its place in the run, so that writing it twice makes one row."""

    event: SpanEvent | Notice
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRun:
    event: RunFinished
    finished_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteComparison:
    comparison_id: str


Command = (
    StartComparison | StartRun | RunStarted | TokenEvent | RoundEvent | NumberedEvent | FinishRun | DeleteComparison
)


def run_of(command: Command) -> str | None:
    """The run that a command belongs to."""
    match command:
        case NumberedEvent(event=event) | FinishRun(event=event):
            return event.run_id
        case StartComparison() | DeleteComparison():
            return None
        case _:
            return command.run_id
