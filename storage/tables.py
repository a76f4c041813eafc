"""The four tables that hold a run's rows, and the order of the rows in each."""

# ruff: noqa: S608 (statements are put together from our own names; values are always parameters)

from collections.abc import Iterator, Mapping
from typing import Any

from sqlite_utils import Database

ROW_ORDER: Mapping[str, str] = {
    "rounds": "round_index",
    "tokens": "token_index",
    "spans": "span_index",
    "notices": "notice_index",
}


def rows_of_run(db: Database, table: str, run_id: str) -> Iterator[dict[str, Any]]:
    """The stored rows of one run, in order, one at a time."""
    return db.query(f"SELECT * FROM {table} WHERE run_id = ? ORDER BY {ROW_ORDER[table]}", (run_id,))
