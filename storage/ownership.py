"""Which process owns a run, told by a lock that the operating system frees when the process dies.

A process id alone cannot say it: ids are used again, and two containers may share the file.
"""

import glob
import time
import uuid
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

_SWEEP_AGE = 60.0


class Ownership:
    """An owner's name, alive for as long as this object's process holds its lock file."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self.owner = uuid.uuid4().hex
        self._lock = FileLock(_lock_file(database, self.owner), thread_local=False)

    def acquire(self) -> None:
        """Take the lock before any row names this owner. Idempotent. Raises OSError."""
        if not self._lock.is_locked:
            self._lock.acquire(timeout=5.0)

    def release(self) -> None:
        if self._lock.is_locked:
            self._lock.release()
            _lock_file(self._database, self.owner).unlink(missing_ok=True)


def is_dead(database: Path, owner: str) -> bool:
    """Whether no live process holds the owner's lock."""
    file = _lock_file(database, owner)
    if not file.exists():
        return True
    lock = FileLock(file, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    lock.release()
    return True


def sweep(database: Path) -> None:
    """Remove the lock files that dead processes left; a young one may be about to be locked and stays."""
    for file in database.parent.glob(f"{glob.escape(database.name)}-owner-*.lock"):
        owner = file.name.removeprefix(f"{database.name}-owner-").removesuffix(".lock")
        # Another program may sweep at the same time.
        with suppress(FileNotFoundError):
            if time.time() - file.stat().st_mtime > _SWEEP_AGE and is_dead(database, owner):
                file.unlink()


def _lock_file(database: Path, owner: str) -> Path:
    return database.with_name(f"{database.name}-owner-{owner}.lock")
