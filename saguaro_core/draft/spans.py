"""What the draft did and when, until a speculation carries it to the engine."""

from saguaro_core.draft.messages import DraftSpan
from saguaro_core.events import SpanKind


class SpanLog:
    """Finished stretches of work, and at most one that is still open."""

    def __init__(self) -> None:
        self._spans: list[DraftSpan] = []
        self._open: tuple[float, int] | None = None

    @property
    def is_open(self) -> bool:
        """Whether a stretch has begun and not ended."""
        return self._open is not None

    def add(self, kind: SpanKind, start: float, end: float, round_index: int) -> None:
        """Record a stretch."""
        self._spans.append(DraftSpan(kind=kind, start=start, end=end, round_index=round_index))

    def open(self, start: float, round_index: int) -> None:
        """Begin a stretch that is closed later, when it may no longer be this round."""
        self._open = start, round_index

    def close(self, kind: SpanKind, end: float) -> None:
        """End the open stretch, if there is one."""
        if self._open is not None:
            start, round_index = self._open
            self._open = None
            self.add(kind, start, end, round_index)

    def take(self) -> tuple[DraftSpan, ...]:
        """All finished stretches, once."""
        spans, self._spans = tuple(self._spans), []
        return spans
