"""A run that has not ended, and what is needed to end it if the engine process cannot."""

from collections.abc import Callable
from dataclasses import dataclass, field

from saguaro_core.events import Event, RunFinished, TokenEvent
from saguaro_core.figures import FiguresAccumulator

EventListener = Callable[[Event], None]


@dataclass(slots=True)
class OpenRun:
    """What a run has said so far, and who listens to it."""

    listener: EventListener
    figures: FiguresAccumulator
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    last_time: float = 0.0

    def take(self, event: Event) -> None:
        """Keep what an event says."""
        self.figures.add(event)
        if isinstance(event, TokenEvent):
            self.token_ids.append(event.token_id)
            self.text.append(event.text)
            self.last_time = event.time

    def cut(self, run_id: str, error: str | None) -> RunFinished:
        """The end of a run that nobody else will end: failed with an error, stopped by its user without one."""
        return RunFinished(
            run_id=run_id,
            status="stopped" if error is None else "failed",
            stop_reason="user" if error is None else "error",
            time=self.last_time,
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            figures=self.figures.figures(self.last_time),
            error=error,
        )
