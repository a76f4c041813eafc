"""One place for how an event becomes a row and a row an event again.

Texts are stored as they are: no escaping, no trimming. Only what SQLite cannot hold is replaced: half a surrogate
pair becomes U+FFFD, and a number that is not finite becomes NULL.
"""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from saguaro_core.events import (
    Alternative,
    Notice,
    PreparedOutcome,
    RoundEvent,
    RunFinished,
    RunStarted,
    SpanEvent,
    TokenEvent,
)
from saguaro_core.figures import RunFigures
from storage.commands import StartComparison, StartRun

Row = dict[str, Any]

JSON_COLUMNS = frozenset(
    {
        "messages",
        "settings",
        "versions",
        "engine",
        "prompt_token_ids",
        "answer_token_ids",
        "figures",
        "fan_out",
        "prepared",
        "alternatives",
    }
)
FIGURE_COLUMNS = (
    "num_tokens",
    "elapsed",
    "time_to_first_token",
    "decode_tokens_per_second",
    "tokens_per_second_per_device",
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "draft_acceptance_rate",
    "mean_acceptance_length",
    "cache_hit_rate",
    "build_overlap",
)
_TITLE_LENGTH = 80


def clean_text(text: str) -> str:
    """The text itself, unless it holds half a surrogate pair, which UTF-8 cannot carry."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def json_text(value: object) -> str:
    """Valid JSON for plain data and dataclasses; numbers that are not finite become null."""
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        return msgspec.json.encode(_clean(msgspec.to_builtins(value))).decode()


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, Mapping):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return value


def utc_text(seconds: float) -> str:
    """Unix time as ISO 8601 in UTC, which sorts as text and which SQLite's date functions read."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def decode_row(row: Mapping[str, Any]) -> Row:
    """A stored row with its JSON columns as plain data."""
    return {
        name: msgspec.json.decode(value) if name in JSON_COLUMNS and value is not None else value
        for name, value in row.items()
    }


def comparison_row(command: StartComparison) -> Row:
    prompt = command.messages[-1].content if command.messages else ""
    return {
        "id": command.comparison_id,
        "title": clean_text(command.title or short_title(prompt)),
        "prompt": clean_text(prompt),
        "messages": json_text(command.messages),
        "settings": json_text(command.settings),
        "created_at": utc_text(command.created_at),
    }


def short_title(prompt: str) -> str:
    """The prompt's beginning on one line."""
    line = " ".join(prompt[: 8 * _TITLE_LENGTH].split())
    return line if len(line) <= _TITLE_LENGTH else line[: _TITLE_LENGTH - 1] + "…"


def run_row(command: StartRun, owner: str) -> Row:
    request, info = command.request, command.info
    target, draft = info.target, info.draft
    return {
        "id": command.run_id,
        "comparison_id": command.comparison_id,
        "mode": request.mode,
        "status": "running",
        "queued_at": utc_text(command.queued_at),
        "settings": json_text(request.settings()),
        "seed": request.sampling.seed,
        "target": target.name,
        "target_revision": target.revision,
        "target_dtype": target.dtype,
        "target_device": target.device,
        "draft": draft and draft.name,
        "draft_revision": draft and draft.revision,
        "draft_dtype": draft and draft.dtype,
        "draft_device": draft and draft.device,
        "hardware": info.hardware,
        "versions": json_text(info.versions),
        "engine": json_text(info),
        "owner": owner,
    }


def started_columns(event: RunStarted) -> Row:
    return {
        "started_at": utc_text(event.started_at),
        "prompt": clean_text(event.prompt),
        "prompt_token_ids": json_text(event.prompt_token_ids),
    }


def finished_columns(event: RunFinished, finished_at: float, rows_complete: bool) -> Row:
    return {
        "status": event.status,
        "stop_reason": event.stop_reason,
        "error": None if event.error is None else clean_text(event.error),
        "finished_at": utc_text(finished_at),
        "answer": clean_text(event.text),
        "answer_token_ids": json_text(event.token_ids),
        **figure_columns(event.figures),
        "rows_complete": int(rows_complete),
    }


def figure_columns(figures: RunFigures) -> Row:
    """All figures as JSON, and the main ones as columns to sort by."""
    main = {name: _finite(getattr(figures, name)) for name in FIGURE_COLUMNS}
    return {**main, "figures": json_text(figures)}


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None


def token_row(event: TokenEvent) -> Row:
    return {
        "run_id": event.run_id,
        "token_index": event.index,
        "token_id": event.token_id,
        "text": clean_text(event.text),
        "time_s": event.time,
        "round_index": event.round_index,
        "place": event.place,
        "origin": event.origin,
        "p": _finite(event.p),
        "q": _finite(event.q),
        "alternatives": json_text(event.alternatives),
    }


def token_event(row: Mapping[str, Any]) -> TokenEvent:
    return TokenEvent(
        run_id=row["run_id"],
        index=row["token_index"],
        token_id=row["token_id"],
        text=row["text"],
        time=row["time_s"],
        round_index=row["round_index"],
        place=row["place"],
        origin=row["origin"],
        p=row["p"],
        q=row["q"],
        alternatives=msgspec.json.decode(row["alternatives"], type=tuple[Alternative, ...]),
    )


def round_row(event: RoundEvent) -> Row:
    return {
        "run_id": event.run_id,
        "round_index": event.index,
        "drafted": event.drafted,
        "accepted": event.accepted,
        "num_committed": event.num_committed,
        "bonus_token_id": event.bonus_token_id,
        "cache": event.cache,
        "fallback": event.fallback,
        "fan_out": json_text(event.fan_out),
        "prepared": json_text(event.prepared),
        "start_s": event.start,
        "verify_ms": event.verify_ms,
        "draft_ms": event.draft_ms,
        "wait_ms": event.wait_ms,
    }


def round_event(row: Mapping[str, Any]) -> RoundEvent:
    return RoundEvent(
        run_id=row["run_id"],
        index=row["round_index"],
        drafted=row["drafted"],
        accepted=row["accepted"],
        bonus_token_id=row["bonus_token_id"],
        start=row["start_s"],
        verify_ms=row["verify_ms"],
        draft_ms=row["draft_ms"],
        wait_ms=row["wait_ms"],
        cache=row["cache"],
        fallback=row["fallback"],
        fan_out=msgspec.json.decode(row["fan_out"], type=tuple[int, ...]),
        prepared=msgspec.json.decode(row["prepared"], type=tuple[PreparedOutcome, ...]),
        num_committed=row["num_committed"],
    )


def span_row(event: SpanEvent, place: int) -> Row:
    return {
        "run_id": event.run_id,
        "span_index": place,
        "lane": event.lane,
        "kind": event.kind,
        "start_s": event.start,
        "end_s": event.end,
        "round_index": event.round_index,
    }


def span_event(row: Mapping[str, Any]) -> SpanEvent:
    return SpanEvent(
        run_id=row["run_id"],
        lane=row["lane"],
        kind=row["kind"],
        start=row["start_s"],
        end=row["end_s"],
        round_index=row["round_index"],
    )


def notice_row(event: Notice, place: int) -> Row:
    return {
        "run_id": event.run_id,
        "notice_index": place,
        "message": clean_text(event.message),
        "time_s": event.time,
    }


def notice_event(row: Mapping[str, Any]) -> Notice:
    return Notice(run_id=row["run_id"], message=row["message"], time=row["time_s"])
