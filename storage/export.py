"""Exports of a run, a comparison or a selection, as JSON, JSONL or CSV, streamed from one snapshot of the log."""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, get_args

from sqlite_utils import Database

from saguaro_core.errors import InvalidRequest
from storage.csv_export import csv_zip
from storage.errors import NotStored
from storage.json_export import json_pieces, jsonl_pieces
from storage.queries import LogReader
from storage.scope import Scope, Selection, resolve

ExportFormat = Literal["json", "jsonl", "csv"]
EXPORT_FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)
_MEDIA_TYPES = {"json": "application/json", "jsonl": "application/x-ndjson", "csv": "application/zip"}
_SUFFIXES = {"json": ".json", "jsonl": ".jsonl", "csv": "-csv.zip"}
_CHUNK = 64 * 1024
_SLUG_LENGTH = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFile:
    """A download: send `chunks` once, in order; closing the iterator early frees the log."""

    filename: str
    media_type: str
    chunks: Iterator[bytes]


def export(reader: LogReader, selection: Selection, export_format: ExportFormat) -> ExportFile:
    """Prepare an export. Raises InvalidRequest or NotStored before anything is sent."""
    if export_format not in EXPORT_FORMATS:
        raise InvalidRequest(f"format is {export_format!r}: choose one of {', '.join(EXPORT_FORMATS)}.")
    if not selection.comparison_ids and not selection.run_ids:
        raise InvalidRequest("the selection is empty: choose at least one comparison or run to export.")
    with reader.snapshot() as db:
        scope = resolve(db, selection)
        name = _name(db, scope, selection)
    return ExportFile(
        filename=name + _SUFFIXES[export_format],
        media_type=_MEDIA_TYPES[export_format],
        chunks=_chunks(reader, scope, _MAKERS[export_format]),
    )


def _chunks(reader: LogReader, scope: Scope, make: Callable[[Database, Scope], Iterable[bytes]]) -> Iterator[bytes]:
    """The export in pieces that are worth sending, all read from one moment of the log."""
    buffer = bytearray()
    with reader.snapshot() as db:
        for piece in make(db, scope):
            buffer += piece
            if len(buffer) >= _CHUNK:
                yield bytes(buffer)
                buffer.clear()
    yield bytes(buffer)


def _encoded(make: Callable[[Database, Scope], Iterable[str]]) -> Callable[[Database, Scope], Iterable[bytes]]:
    return lambda db, scope: (piece.encode() for piece in make(db, scope))


_MAKERS: dict[str, Callable[[Database, Scope], Iterable[bytes]]] = {
    "json": _encoded(json_pieces),
    "jsonl": _encoded(jsonl_pieces),
    "csv": csv_zip,
}


def _name(db: Database, scope: Scope, selection: Selection) -> str:
    """A file name that says what is inside: kind, date, title and the id's beginning."""
    if len(scope.runs) > 1:
        today = datetime.now(UTC).strftime("%Y-%m-%d-%H%M%S")
        return f"saguaro-selection-{len(scope.runs)}-comparisons-{today}"
    ((comparison_id, run_ids),) = scope.runs.items()
    comparison = _row(db, "SELECT title, created_at AS at FROM comparisons WHERE id = ?", comparison_id)
    kind, item_id, at = "compare", comparison_id, comparison["at"]
    if len(run_ids) == 1 and not selection.comparison_ids:
        run = _row(db, "SELECT mode, queued_at AS at FROM runs WHERE id = ?", run_ids[0])
        kind, item_id, at = run["mode"], run_ids[0], run["at"]
    parts = ("saguaro", kind, _date(at), _slug(comparison["title"], _SLUG_LENGTH), _slug(item_id, 8))
    return "-".join(part for part in parts if part)


def _row(db: Database, query: str, row_id: str) -> dict[str, str]:
    for row in db.query(query, (row_id,)):
        return row
    raise NotStored(f"The log holds no row {row_id!r}.")


def _date(at: str) -> str:
    return datetime.fromisoformat(at).strftime("%Y-%m-%d-%H%M%S")


def _slug(text: str, length: int) -> str:
    """Lower-case ASCII letters, digits and hyphens: safe in any file system and any header."""
    ascii_text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", ascii_text).strip("-")[:length].strip("-")
