"""Opening the log: where it lies, how a connection is set up, and which files are refused.

The file lies in the user's data directory, never in the working directory, which a web server may serve.
"""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_data_path
from sqlite_utils import Database

from storage.errors import SchemaRefused, StorageError
from storage.migrations import MIGRATION_SET, known_steps, migrations

MINIMUM_SQLITE = (3, 38, 0)
_BUSY = ("SQLITE_BUSY", "SQLITE_LOCKED")


def default_database_path() -> Path:
    """`saguaro.db` in the user's data directory."""
    return user_data_path("saguaro", appauthor=False) / "saguaro.db"


def resolve_path(path: str | Path | None) -> Path:
    """The absolute path of a given database, or of the default one."""
    return Path(path).expanduser().resolve() if path is not None else default_database_path()


def is_busy(error: BaseException) -> bool:
    """Whether another connection holds the lock, so that waiting helps."""
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorname", "").startswith(_BUSY)


def open_for_writing(path: Path, busy_timeout: float = 1.0) -> Database:
    """Open (or create) the log with the newest schema, WAL and foreign keys on.

    Raises SchemaRefused, before anything is changed, for a newer log or another program's file, and the plain
    sqlite3.Error, OSError or StorageError for what may pass: a lock, a full disk, missing rights, a folder there.
    """
    _require_sqlite()
    if path.is_dir():
        raise StorageError("it is a folder: give a file in it")
    make_folder(path.parent)
    db = _connect(path, "rwc", busy_timeout)
    try:
        if check_schema(db, path):
            _migrate(db, busy_timeout)
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        db.close()
        raise
    return db


def open_for_reading(path: Path, busy_timeout: float = 5.0) -> Database:
    """Open an existing log read-only. The caller closes it, on any thread (a streamed export hops threads)."""
    return _connect(path, "ro", busy_timeout)


@contextmanager
def transaction(db: Database) -> Iterator[None]:
    """BEGIN IMMEDIATE ... COMMIT: the lock is taken first, so that waiting happens before any work."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.commit()
    except BaseException:
        db.rollback()
        raise


def check_schema(db: Database, path: Path) -> tuple[str, ...]:
    """The steps that are still to be applied. Raises SchemaRefused for a file that this version must not touch."""
    applied = _applied_steps(db, path)
    known = known_steps()
    unknown = [name for name in applied if name not in known]
    if unknown:
        raise SchemaRefused(
            f"The log {path} was written by a newer version (its schema has the step {unknown[-1]}, this version knows "
            f"steps up to {known[-1]}). Update this program, or choose another file; nothing was changed."
        )
    return tuple(name for name in known if name not in applied)


def _applied_steps(db: Database, path: Path) -> tuple[str, ...]:
    try:
        applied = tuple(step.name for step in migrations.applied(db))
        tables = set(db.table_names()) - {migrations.migrations_table}
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorname", "") != "SQLITE_NOTADB":
            raise
        raise SchemaRefused(f"{path} is not a SQLite database. Choose another file; nothing was changed.") from error
    if tables and not applied:
        raise SchemaRefused(
            f"The database {path} belongs to another program (it has the table {min(tables)} and no "
            f"{MIGRATION_SET} schema). Choose another file; nothing was changed."
        )
    return applied


def make_folder(folder: Path) -> None:
    """Create the log's folder for its user alone: prompts are private."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _require_sqlite() -> None:
    if sqlite3.sqlite_version_info < MINIMUM_SQLITE:
        needed = ".".join(map(str, MINIMUM_SQLITE))
        raise StorageError(
            f"This Python uses SQLite {sqlite3.sqlite_version}: the log needs {needed} or newer. Use a newer Python."
        )


def _connect(path: Path, mode: str, busy_timeout: float) -> Database:
    """A connection without implicit transactions: every BEGIN is in our own code."""
    connection = sqlite3.connect(
        f"{path.as_uri()}?mode={mode}", uri=True, timeout=busy_timeout, isolation_level=None, check_same_thread=False
    )
    return Database(connection, execute_plugins=False)


def _migrate(db: Database, patience: float) -> None:
    """Apply the open steps in one transaction, once, also when two programs start together."""
    deadline = time.monotonic() + patience
    while True:
        try:
            # Changing the journal mode does not wait for locks by itself.
            db.enable_wal()
            db.execute("BEGIN IMMEDIATE")
            break
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() >= deadline:
                raise
            time.sleep(0.02)
    try:
        migrations.apply(db)
        db.commit()
    except BaseException:
        db.rollback()
        raise
