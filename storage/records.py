"""What the read side returns: plain frozen data, ready for JSON, with events as the engine emitted them."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from saguaro_core.config import Message, Mode
from saguaro_core.events import Notice, RoundEvent, SpanEvent, StopReason, TokenEvent
from saguaro_core.figures import RunFigures

StoredStatus = Literal["running", "finished", "stopped", "failed", "interrupted"]
STORED_STATUSES: tuple[StoredStatus, ...] = get_args(StoredStatus)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run as a list shows it. Figures that are not defined are None. A lost draft makes a speed partly AR's."""

    id: str
    mode: Mode
    status: StoredStatus
    stop_reason: StopReason | None
    error: str | None
    queued_at: str
    num_tokens: int | None
    time_to_first_token: float | None
    decode_tokens_per_second: float | None
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None
    cache_hit_rate: float | None
    has_lost_draft: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """A comparison as a list shows it. `number` grows with time."""

    number: int
    id: str
    title: str
    prompt: str
    created_at: str
    runs: tuple[RunSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPage:
    """Entries, newest first; `total` counts all that match; `next_before` asks for the following page."""

    entries: tuple[HistoryEntry, ...]
    total: int
    next_before: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run's own row. `rows_complete` is false when rounds, tokens or spans of it were lost.

    A running run without `started_at` is still queued. `prompt` is the rendered chat template. `engine` is the
    EngineInfo it ran on, `settings` what `GenerationRequest.settings` says.
    """

    id: str
    comparison_id: str
    mode: Mode
    status: StoredStatus
    stop_reason: StopReason | None
    error: str | None
    queued_at: str
    started_at: str | None
    finished_at: str | None
    settings: dict[str, Any]
    seed: int
    engine: dict[str, Any]
    prompt: str | None
    prompt_token_ids: tuple[int, ...] | None
    answer: str
    answer_token_ids: tuple[int, ...]
    num_tokens: int | None
    figures: RunFigures | None
    rows_complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredComparison:
    """One prompt and the runs that answered it, in the order they were queued."""

    number: int
    id: str
    title: str
    prompt: str
    messages: tuple[Message, ...]
    settings: dict[str, Any]
    created_at: str
    runs: tuple[StoredRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetail:
    """A run with everything it emitted."""

    run: StoredRun
    rounds: tuple[RoundEvent, ...]
    tokens: tuple[TokenEvent, ...]
    spans: tuple[SpanEvent, ...]
    notices: tuple[Notice, ...]
