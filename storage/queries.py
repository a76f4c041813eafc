"""The read side of the log: one read-only connection per call, so that any thread may ask at any time."""

# ruff: noqa: S608 (statements are put together from our own names; values are always parameters)

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from sqlite_utils import Database

from saguaro_core.config import MODES, Message, Mode
from saguaro_core.errors import InvalidRequest
from saguaro_core.figures import RunFigures
from storage import rows
from storage.database import check_schema, open_for_reading, resolve_path
from storage.errors import NotStored, StorageError
from storage.records import (
    STORED_STATUSES,
    HistoryEntry,
    HistoryPage,
    RunDetail,
    RunSummary,
    StoredComparison,
    StoredRun,
    StoredStatus,
)
from storage.search import Condition, search_conditions
from storage.tables import rows_of_run

_MAX_LIMIT = 500
_SUMMARY_COLUMNS = [name for name in RunSummary.__dataclass_fields__ if name != "has_lost_draft"]
_NOTICES = "SELECT notices.* FROM notices JOIN runs ON runs.id = notices.run_id WHERE comparison_id = ?"
_COMPARISON_COLUMNS = "comparisons.number, comparisons.id, title, comparisons.prompt, created_at"


class LogReader:
    """Reads the log of a running or finished program. Raises StorageError when the file cannot be read."""

    def __init__(self, path: str | Path | None = None, *, busy_timeout: float = 5.0) -> None:
        self.path = resolve_path(path)
        self._busy_timeout = busy_timeout

    def history(
        self,
        text: str = "",
        *,
        mode: Mode | None = None,
        status: StoredStatus | None = None,
        limit: int = 50,
        before: int | None = None,
    ) -> HistoryPage:
        """Comparisons whose prompt, title or answers hold every word of `text`, newest first.

        `mode` and `status` keep those with such a run. `before` is the last page's `next_before`.
        Raises InvalidRequest for an unknown mode or status, or a limit outside 1..500.
        """
        _check_filters(mode, status, limit)
        conditions = [*search_conditions(text), *_run_filter(mode, status)]
        where = " AND ".join(["1", *(condition.sql for condition in conditions)])
        parameters: dict[str, Any] = {name: value for c in conditions for name, value in c.parameters.items()}
        with self.snapshot() as db:
            total = next(db.query(f"SELECT count(*) AS n FROM comparisons WHERE {where}", parameters))["n"]
            select = (
                f"SELECT {_COMPARISON_COLUMNS} FROM comparisons WHERE {where} "
                "AND (:before IS NULL OR comparisons.number < :before) ORDER BY comparisons.number DESC LIMIT :limit"
            )
            page = list(db.query(select, {**parameters, "before": before, "limit": limit + 1}))
            has_more = len(page) > limit
            entries = tuple(_history_entries(db, page[:limit]))
        return HistoryPage(entries=entries, total=total, next_before=entries[-1].number if has_more else None)

    def comparison(self, comparison_id: str) -> StoredComparison:
        """One comparison with its runs. Raises NotStored."""
        with self.snapshot() as db:
            row = _one(db, "comparisons", "comparison", comparison_id)
            runs = db.query("SELECT * FROM runs WHERE comparison_id = ? ORDER BY number", (comparison_id,))
            return _comparison(row, map(_run, runs))

    def run(self, run_id: str) -> RunDetail:
        """One run with its rounds, tokens, spans and notices. Raises NotStored."""
        with self.snapshot() as db:
            return RunDetail(
                run=_run(_one(db, "runs", "run", run_id)),
                rounds=tuple(map(rows.round_event, rows_of_run(db, "rounds", run_id))),
                tokens=tuple(map(rows.token_event, rows_of_run(db, "tokens", run_id))),
                spans=tuple(map(rows.span_event, rows_of_run(db, "spans", run_id))),
                notices=tuple(map(rows.notice_event, rows_of_run(db, "notices", run_id))),
            )

    @contextmanager
    def snapshot(self) -> Iterator[Database]:
        """A read-only connection inside one transaction: everything read through it is of one moment."""
        try:
            db = open_for_reading(self.path, self._busy_timeout)
        except sqlite3.Error as error:
            raise self._unreadable(error) from error
        try:
            check_schema(db, self.path)
            db.execute("BEGIN")
            yield db
        except sqlite3.Error as error:
            raise self._unreadable(error) from error
        finally:
            db.close()

    def _unreadable(self, error: sqlite3.Error) -> StorageError:
        return StorageError(
            f"The log {self.path} could not be read ({error}). Check that the file exists and is a log, then try again."
        )


def _check_filters(mode: str | None, status: str | None, limit: int) -> None:
    if mode is not None and mode not in MODES:
        raise InvalidRequest(f"mode is {mode!r}: choose one of {', '.join(MODES)}.")
    if status is not None and status not in STORED_STATUSES:
        raise InvalidRequest(f"status is {status!r}: choose one of {', '.join(STORED_STATUSES)}.")
    if not 1 <= limit <= _MAX_LIMIT:
        raise InvalidRequest(f"limit is {limit!r}: give a whole number from 1 to {_MAX_LIMIT}.")


def _run_filter(mode: str | None, status: str | None) -> list[Condition]:
    wanted = {name: value for name, value in (("mode", mode), ("status", status)) if value is not None}
    if not wanted:
        return []
    matches = " AND ".join(f"{name} = :{name}" for name in wanted)
    return [Condition(f"comparisons.id IN (SELECT comparison_id FROM runs WHERE {matches})", wanted)]


def _history_entries(db: Database, page: list[rows.Row]) -> Iterator[HistoryEntry]:
    columns = ", ".join(_SUMMARY_COLUMNS)
    for row in page:
        notices = map(rows.notice_event, db.query(_NOTICES, (row["id"],)))
        lost = {notice.run_id for notice in notices if notice.is_draft_lost}
        runs = db.query(f"SELECT {columns} FROM runs WHERE comparison_id = ? ORDER BY number", (row["id"],))
        yield HistoryEntry(**row, runs=tuple(RunSummary(**run, has_lost_draft=run["id"] in lost) for run in runs))


def _one(db: Database, table: str, noun: str, row_id: str) -> rows.Row:
    for row in db.query(f"SELECT * FROM {table} WHERE id = ?", (row_id,)):
        return row
    raise NotStored(f"The log holds no {noun} {row_id!r}. It may have been deleted; look in the history.")


def _comparison(row: rows.Row, runs: Iterable[StoredRun]) -> StoredComparison:
    messages = msgspec.json.decode(row["messages"], type=tuple[Message, ...])
    settings = msgspec.json.decode(row["settings"])
    return StoredComparison(**{**row, "messages": messages, "settings": settings, "runs": tuple(runs)})


def _run(row: rows.Row) -> StoredRun:
    plain = rows.decode_row(row)
    prompt_ids = plain["prompt_token_ids"]
    figures = None if row["figures"] is None else msgspec.json.decode(row["figures"], type=RunFigures)
    values = {name: plain[name] for name in StoredRun.__dataclass_fields__}
    values |= {
        "prompt_token_ids": None if prompt_ids is None else tuple(prompt_ids),
        "answer_token_ids": tuple(plain["answer_token_ids"]),
        "figures": figures,
        "rows_complete": bool(plain["rows_complete"]),
    }
    return StoredRun(**values)
