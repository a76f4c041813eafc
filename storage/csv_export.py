"""The CSV files of an export, in one zip that is made as it is sent.

Spreadsheets run cells that begin like a formula, and answers are untrusted: such texts get a leading apostrophe.
Numbers, and texts that are plain numbers, stay as they are.
"""

import csv
import io
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence

from sqlite_utils import Database

from storage.json_export import LOCAL_COLUMNS, header
from storage.rows import json_text
from storage.scope import Scope
from storage.tables import rows_of_run

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
_PLAIN_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_ROWS_PER_CHUNK = 500
_ROW_TABLES = ("rounds", "tokens")

Cell = str | int | float | None


def safe_cell(value: Cell) -> Cell:
    """A cell that no spreadsheet takes for a formula."""
    if isinstance(value, str) and value.startswith(_FORMULA_STARTS) and not _PLAIN_NUMBER.fullmatch(value):
        return "'" + value
    return value


def csv_zip(db: Database, scope: Scope) -> Iterator[bytes]:
    """runs.csv, rounds.csv and tokens.csv with the log's columns, and about.json with the export's header."""
    return _zip(
        [
            ("about.json", [json_text(header())]),
            ("runs.csv", _pieces(_columns(db, "runs"), _run_rows(db, scope))),
            *((f"{table}.csv", _pieces(_columns(db, table), _row_rows(db, table, scope))) for table in _ROW_TABLES),
        ]
    )


def _columns(db: Database, table: str) -> list[str]:
    return [column for column in db[table].columns_dict if column not in LOCAL_COLUMNS]


def _run_rows(db: Database, scope: Scope) -> Iterator[Mapping[str, Cell]]:
    for run_id in scope.run_ids:
        yield from db["runs"].rows_where("id = ?", (run_id,))


def _row_rows(db: Database, table: str, scope: Scope) -> Iterator[Mapping[str, Cell]]:
    for run_id in scope.run_ids:
        yield from rows_of_run(db, table, run_id)


class _Outbox(io.RawIOBase):
    """A file that cannot seek: what the zip writes into it is taken out by the sender."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self._parts.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        data = b"".join(self._parts)
        self._parts.clear()
        return data


def _zip(files: Iterable[tuple[str, Iterable[str]]]) -> Iterator[bytes]:
    """A zip of text files, each given as its name and its pieces."""
    outbox = _Outbox()
    with zipfile.ZipFile(outbox, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, pieces in files:
            with archive.open(name, "w", force_zip64=True) as member:
                for piece in pieces:
                    member.write(piece.encode())
                    if data := outbox.take():
                        yield data
    yield outbox.take()


def _pieces(columns: Sequence[str], rows: Iterable[Mapping[str, Cell]]) -> Iterator[str]:
    """A CSV file with a header line, a few hundred rows at a time."""
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer)
    writer.writerow(columns)
    for place, row in enumerate(rows):
        writer.writerow([safe_cell(row[column]) for column in columns])
        if place % _ROWS_PER_CHUNK == _ROWS_PER_CHUNK - 1:
            yield _drain(buffer)
    yield _drain(buffer)


def _drain(buffer: io.StringIO) -> str:
    text = buffer.getvalue()
    buffer.seek(0)
    buffer.truncate()
    return text
