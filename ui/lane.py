"""One lane of a comparison as plain data: it grows event by event and is read by cursor.

Tokens, rounds and spans only ever get longer, so a reader that remembers three lengths needs nothing but the rest.
Times are the engine's own; nothing is measured here except how long the lane has been running, for its clock.
"""

import math
import time
from dataclasses import asdict
from typing import Any

from saguaro_core.config import Mode
from saguaro_core.events import (
    Event,
    Notice,
    PhaseEvent,
    RoundEvent,
    RunFinished,
    RunStarted,
    SpanEvent,
    TokenEvent,
)
from saguaro_core.figures import FiguresAccumulator
from saguaro_core.run_figures import RunFigures

ACTIVE = ("queued", "prefill", "decode")
Row = list[Any]
Cursor = tuple[int, int, int]


def _finite(value: float | None, digits: int = 6) -> float | None:
    """JSON has no NaN, and one would end the page's stream."""
    return round(value, digits) if value is not None and math.isfinite(value) else None


def token_row(token: TokenEvent) -> Row:
    """[id, text, seconds, origin, round, place, p, q, alternatives], as the page's renderer reads it."""
    alternatives = [[a.token_id, a.text, _finite(a.p)] for a in token.alternatives]
    return [
        token.token_id, token.text, _finite(token.time), token.origin, token.round_index, token.place,
        _finite(token.p), _finite(token.q), alternatives,
    ]  # fmt: skip


def round_row(event: RoundEvent) -> Row:
    """[index, start, verify_ms, draft_ms, wait_ms, drafted, accepted, cache, fallback]."""
    return [
        event.index, _finite(event.start), _finite(event.verify_ms), _finite(event.draft_ms), _finite(event.wait_ms),
        event.drafted, event.accepted, event.cache, event.fallback,
    ]  # fmt: skip


class LaneState:
    """What is known of one run so far. Not thread-safe: its comparison holds the lock."""

    def __init__(self, run_id: str, mode: Mode, num_devices: int = 1) -> None:
        self.run_id = run_id
        self.mode = mode
        self.phase = "queued"
        self.progress: float | None = None
        self.stop_reason: str | None = None
        self.error: str | None = None
        self.notices: list[str] = []
        self.has_lost_draft = False
        self.tokens: list[Row] = []
        self.rounds: list[Row] = []
        self.spans: list[Row] = []
        self._accumulator = FiguresAccumulator(mode, num_devices)
        self._num_fallbacks = 0
        self._last_time = 0.0
        self._result: RunFigures | None = None
        self._final_text: str | None = None
        self._started: float | None = None

    @property
    def is_active(self) -> bool:
        return self.phase in ACTIVE

    @property
    def is_finished(self) -> bool:
        """True for a complete answer: the only kind that figures may be compared with."""
        return self.phase == "finished"

    @property
    def text(self) -> str:
        return self._final_text if self._final_text is not None else "".join(row[1] for row in self.tokens)

    @property
    def token_ids(self) -> list[int]:
        return [row[0] for row in self.tokens]

    @property
    def result(self) -> RunFigures:
        """The figures so far, or the engine's own final ones."""
        return self._result if self._result is not None else self._accumulator.figures(self._last_time)

    @property
    def figures(self) -> dict[str, Any]:
        """The figures as plain data; `num_fallbacks` counts the misses that a fallback served."""
        values = asdict(self.result) | {"num_fallbacks": self._num_fallbacks if self.mode == "ssd" else None}
        return {name: _finite(value) if isinstance(value, float) else value for name, value in values.items()}

    def mark(self, phase: str) -> None:
        """Set the phase of a stored run that has no end: interrupted, or running in another program."""
        self.phase = phase

    def apply(self, event: Event) -> None:
        """Take one event of this run."""
        self._accumulator.add(event)
        match event:
            case TokenEvent():
                self._add_token(event)
            case RoundEvent():
                self._add_round(event)
            case SpanEvent():
                self.spans.append([event.lane, event.kind, _finite(event.start), _finite(event.end), event.round_index])
            case PhaseEvent():
                self.phase, self.progress = event.phase, event.progress
            case RunStarted():
                self.phase, self._started = "prefill", time.monotonic()
            case Notice():
                self.notices.append(event.message)
                self.has_lost_draft |= event.is_draft_lost
            case RunFinished():
                self._finish(event)

    def state(self) -> dict[str, Any]:
        """Everything but the growing lists, small enough to send on every update."""
        return {
            "run_id": self.run_id, "mode": self.mode, "phase": self.phase, "progress": self.progress,
            "stop_reason": self.stop_reason, "error": self.error, "notices": list(self.notices),
            "figures": self.figures, "clock": self._clock(),
        }  # fmt: skip

    def since(self, cursor: Cursor) -> dict[str, Any]:
        """The rows beyond `cursor` and the state; `first` says where the token rows begin."""
        tokens, rounds, spans = cursor
        return {
            **self.state(), "first": tokens, "tokens": self.tokens[tokens:],
            "rounds": self.rounds[rounds:], "spans": self.spans[spans:],
        }  # fmt: skip

    def cursor(self) -> Cursor:
        return len(self.tokens), len(self.rounds), len(self.spans)

    def _add_token(self, event: TokenEvent) -> None:
        self.tokens.append(token_row(event))
        self._last_time = max(self._last_time, event.time)

    def _add_round(self, event: RoundEvent) -> None:
        self.rounds.append(round_row(event))
        # The first round has nothing to miss, and a miss without a fallback speculates on nothing.
        self._num_fallbacks += event.cache == "miss" and event.fallback in ("neural", "ngram", "pair")

    def _finish(self, event: RunFinished) -> None:
        self.phase, self.stop_reason, self.error = event.status, event.stop_reason, event.error
        self.progress, self._final_text = None, event.text
        self._result = event.figures

    def _clock(self) -> float | None:
        """Seconds since the run left the queue, for the running clock on the page only."""
        return time.monotonic() - self._started if self._started is not None and self.is_active else None
