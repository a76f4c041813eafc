"""The JSON and JSONL forms of an export.

A comparison, a run and each of its rows carry exactly the log's columns, JSON columns as data, so that the rows can
be restored. Left out is what means nothing in another log: row numbers and the process that wrote a run.
"""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from sqlite_utils import Database

from storage.metric_definitions import METRIC_DEFINITIONS, TIMES, UNDEFINED
from storage.migrations import known_steps
from storage.rows import Row, decode_row, json_text
from storage.scope import Scope
from storage.tables import ROW_ORDER, rows_of_run

FORMAT_NAME = "saguaro-log"
FORMAT_VERSION = 1
LOCAL_COLUMNS = frozenset({"number", "owner"})
_TYPES = {"rounds": "round", "tokens": "token", "spans": "span", "notices": "notice"}


def header() -> dict[str, Any]:
    """What the export is and how to read it."""
    return {
        "format": FORMAT_NAME,
        "format_version": FORMAT_VERSION,
        "schema": list(known_steps()),
        "exported_at": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "metric_definitions": METRIC_DEFINITIONS,
        "notes": [UNDEFINED, TIMES],
    }


def json_pieces(db: Database, scope: Scope) -> Iterator[str]:
    """One document: the header's fields and `comparisons`, each with `runs`, each with its four lists of rows."""
    yield json_text(header())[:-1] + ', "comparisons": ['
    for place, (comparison_id, run_ids) in enumerate(scope.runs.items()):
        for comparison in _rows(db, "comparisons", comparison_id):
            yield (",\n" if place else "\n") + json_text(comparison)[:-1] + ', "runs": ['
            yield from _joined(_run_pieces(db, run_id) for run_id in run_ids)
            yield "]}"
    yield "]}\n"


def jsonl_pieces(db: Database, scope: Scope) -> Iterator[str]:
    """One JSON object a line, told apart by `type`: export, comparison, run, then the run's rows."""
    yield _line("export", header())
    for comparison_id, run_ids in scope.runs.items():
        for comparison in _rows(db, "comparisons", comparison_id):
            yield _line("comparison", comparison)
        for run_id in run_ids:
            for run in _rows(db, "runs", run_id):
                yield _line("run", run)
            for table in ROW_ORDER:
                for row in rows_of_run(db, table, run_id):
                    yield _line(_TYPES[table], decode_row(row))


def _run_pieces(db: Database, run_id: str) -> Iterator[str]:
    for run in _rows(db, "runs", run_id):
        yield json_text(run)[:-1]
        for table in ROW_ORDER:
            yield f',\n "{table}": ['
            yield from _joined([json_text(decode_row(row))] for row in rows_of_run(db, table, run_id))
            yield "]"
        yield "}"


def _joined(items: Iterable[Iterable[str]]) -> Iterator[str]:
    """The items of a JSON array, each in pieces; an item without pieces is left out."""
    is_first = True
    for item in items:
        for place, piece in enumerate(item):
            yield piece if place else ("\n" if is_first else ",\n") + piece
            is_first = False


def _rows(db: Database, table: str, row_id: str) -> Iterator[Row]:
    for row in db[table].rows_where("id = ?", (row_id,)):
        yield {name: value for name, value in decode_row(row).items() if name not in LOCAL_COLUMNS}


def _line(kind: str, row: Row) -> str:
    return json_text({"type": kind, **row}) + "\n"
