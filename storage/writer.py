"""The write side: one connection, used by the recorder's thread alone, that stores batches in short transactions."""

# ruff: noqa: S608 (statements are put together from our own names; values are always parameters)

import logging
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlite_utils import Database

from saguaro_core.events import Notice, RoundEvent, RunStarted, SpanEvent, TokenEvent
from storage import rows
from storage.commands import Command, DeleteComparison, FinishRun, NumberedEvent, StartComparison, StartRun, run_of
from storage.database import open_for_writing, transaction
from storage.ownership import Ownership, sweep
from storage.recovery import interrupt_dead_runs, interrupt_runs, update_run

logger = logging.getLogger(__name__)

# A row that SQLite refuses for what is in it: waiting does not help, and its neighbours must not suffer.
_ROW_ERRORS = (
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    sqlite3.DataError,
    ValueError,
    TypeError,
    OverflowError,
    AttributeError,
    KeyError,
)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A command that could not be stored, and why."""

    command: Command
    reason: str


class LogWriter:
    """Stores commands in order. `write` raises sqlite3.Error, OSError or StorageError and can be called again."""

    def __init__(self, path: Path, busy_timeout: float) -> None:
        self._path = path
        self._busy_timeout = busy_timeout
        self._ownership = Ownership(path)
        self._db: Database | None = None
        self._file_id: tuple[int, int] | None = None
        self._has_recovered = False

    def write(self, commands: Sequence[Command], lost_runs: Iterable[str] = ()) -> list[Rejected]:
        """Store all commands in one transaction, or none of them; single rows that cannot be stored are returned.

        `lost_runs` already miss rows: their final row says so.
        """
        db = self._connected()
        lost = set(lost_runs)
        rejected: list[Rejected] = []
        with transaction(db):
            for command in commands:
                try:
                    self._apply(db, command, lost)
                except _ROW_ERRORS as error:
                    rejected.append(Rejected(command, f"{type(error).__name__}: {error}"))
                    lost.add(run_of(command) or "")
        return rejected

    def disconnect(self) -> None:
        """Drop the connection after a failure; the next write opens a new one."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def close(self) -> None:
        """Mark this owner's unfinished runs as interrupted, then let go of the file. Never raises."""
        try:
            if self._db is not None:
                interrupt_runs(self._db, (self._ownership.owner,))
        except (sqlite3.Error, OSError) as error:
            logger.warning("Unfinished runs could not be marked; the next start does it: %s", error)
        try:
            self.disconnect()
            self._ownership.release()
        except (sqlite3.Error, OSError) as error:
            logger.warning("The log could not be closed cleanly: %s", error)

    def _connected(self) -> Database:
        # SQLite goes on writing into a file that was deleted under it, and those rows would be lost silently.
        if self._db is not None and self._file_id != _file_id(self._path):
            self.disconnect()
        if self._db is None:
            self._db = open_for_writing(self._path, self._busy_timeout)
            self._file_id = _file_id(self._path)
        if not self._has_recovered:
            self._ownership.acquire()
            try:
                interrupt_dead_runs(self._db, self._path, self._ownership.owner)
            except _ROW_ERRORS:
                # An old run that cannot be read must not keep new ones from being stored.
                logger.exception("Runs of an earlier start could not be marked as interrupted")
            sweep(self._path)
            self._has_recovered = True
        return self._db

    def _apply(self, db: Database, command: Command, lost_runs: set[str]) -> None:
        match command:
            case RunStarted():
                update_run(db, command.run_id, rows.started_columns(command))
            case FinishRun(event=event):
                is_complete = event.run_id not in lost_runs
                update_run(db, event.run_id, rows.finished_columns(event, command.finished_at, is_complete))
            case DeleteComparison():
                db.execute("DELETE FROM comparisons WHERE id = ?", (command.comparison_id,))
            case StartComparison():
                _insert(db, "comparisons", rows.comparison_row(command))
            case StartRun():
                _insert(db, "runs", rows.run_row(command, self._ownership.owner))
            case TokenEvent():
                _insert(db, "tokens", rows.token_row(command))
            case RoundEvent():
                _insert(db, "rounds", rows.round_row(command))
            case NumberedEvent(event=SpanEvent() as span):
                _insert(db, "spans", rows.span_row(span, command.place))
            case NumberedEvent(event=Notice() as notice):
                _insert(db, "notices", rows.notice_row(notice, command.place))


def _insert(db: Database, table: str, row: rows.Row) -> None:
    """Insert one row; the same row again changes nothing, so that a batch can be tried again."""
    names = ", ".join(row)
    places = ", ".join(f":{name}" for name in row)
    db.execute(f"INSERT INTO {table} ({names}) VALUES ({places}) ON CONFLICT DO NOTHING", row)


def _file_id(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_dev, stat.st_ino
