"""The one thread that writes the log: it gathers commands for a moment and stores them in short transactions.

While the log fails, commands wait and the thread tries again. It gives up after a while and starts anew with the
next command, so that a log that works again is used again.
"""

import logging
import sqlite3
import threading
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice

from storage.commands import Command, DeleteComparison, FinishRun, StartComparison, StartRun, run_of
from storage.database import is_busy
from storage.errors import StorageError
from storage.results import SaveResults
from storage.writer import LogWriter, Rejected

logger = logging.getLogger(__name__)

_BATCH = 2000
_RESERVE = 1000
_FAILURES = (sqlite3.Error, OSError, StorageError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderLimits:
    """Times in seconds. `commit_interval` bounds what a killed process loses, `give_up_after` and `max_pending` how
    long and how many rows wait for a log that fails."""

    commit_interval: float = 0.1
    busy_timeout: float = 1.0
    retry_interval: float = 0.2
    give_up_after: float = 120.0
    max_pending: int = 50_000


class LogThread:
    """Owns the writer and the queue before it. `failure` is what already went wrong when the log was opened."""

    def __init__(self, writer: LogWriter, limits: RecorderLimits, failure: BaseException | None = None) -> None:
        self._writer = writer
        self._limits = limits
        self._changed = threading.Condition()
        self._urgent = threading.Event()
        self._pending: deque[Command] = deque()
        self._results = SaveResults()
        # The first thing to be done is to mark the runs of dead processes.
        self._num_queued, self._num_done, self._num_lost = 1, 0, 0
        self._waiting = None if failure is None else _cause(failure)
        self._is_closing = self._must_end = self._has_ended = self._has_given_up = False
        self._thread = threading.Thread(target=self._run, name="saguaro-log", daemon=True)
        self._thread.start()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def waiting(self) -> str | None:
        """Why the log cannot be written now."""
        with self._changed:
            return self._waiting

    @property
    def loss(self) -> str | None:
        """Why rows were lost since the last run that was saved whole."""
        with self._changed:
            return self._results.loss

    def put(self, command: Command) -> None:
        """Queue a command. A full queue loses the row, and its run is marked."""
        run_id = run_of(command)
        is_row = not isinstance(command, (StartComparison, StartRun, FinishRun, DeleteComparison))
        with self._changed:
            if self._is_closing or (is_row and self._results.is_lossy(run_id)):
                return
            if len(self._pending) >= self._limits.max_pending + (0 if is_row else _RESERVE):
                self._num_lost += 1
                self._results.lose(command, f"{len(self._pending)} rows already wait for it")
                self._changed.notify_all()
                return
            self._pending.append(command)
            self._num_queued += 1
            if not is_row:
                self._urgent.set()
            if len(self._pending) == 1:
                self._changed.notify_all()

    def wait_saved(self, run_id: str, timeout: float | None) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._results.is_known(run_id) or self._has_ended, timeout)
            return self._results.is_saved(run_id)

    def flush(self, timeout: float | None) -> bool:
        with self._changed:
            goal, num_lost = self._num_queued, self._num_lost
            self._urgent.set()
            self._changed.wait_for(lambda: self._num_done >= goal or self._has_ended, timeout)
            return self._num_done >= goal and self._num_lost == num_lost

    def close(self, timeout: float) -> None:
        with self._changed:
            self._is_closing = True
            self._urgent.set()
            self._changed.notify_all()
        self._thread.join(timeout)
        with self._changed:
            self._must_end = True
            self._changed.notify_all()
        self._thread.join(self._limits.busy_timeout + 1.0)

    def _run(self) -> None:
        self._take_up()
        while batch := self._next_batch():
            self._store(batch)
        self._writer.close()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _take_up(self) -> None:
        """Mark the runs of dead processes as soon as the log can be written; rows that come earlier do it, too."""
        is_done = False
        while not is_done:
            failure = self._attempt([])[1]
            with self._changed:
                if failure is None:
                    self._waiting, is_done = None, True
                else:
                    self._note(failure)
                    is_done = self._changed.wait_for(self._has_work, self._limits.retry_interval)
        with self._changed:
            self._num_done += 1
            self._changed.notify_all()

    def _has_work(self) -> bool:
        return bool(self._pending) or self._is_closing

    def _next_batch(self) -> list[Command]:
        """The oldest rows, gathered for one commit interval; empty when the log closes."""
        with self._changed:
            self._changed.wait_for(self._has_work)
        self._urgent.wait(self._limits.commit_interval)
        with self._changed:
            self._urgent.clear()
            if self._is_closing or len(self._pending) > _BATCH:
                self._urgent.set()
            return list(islice(self._pending, _BATCH))

    def _store(self, batch: list[Command]) -> None:
        """Write one batch, trying again for as long as the limits allow."""
        deadline = time.monotonic() + self._limits.give_up_after
        while True:
            rejected, failure = self._attempt(batch)
            with self._changed:
                if failure is None:
                    self._settle(batch, rejected)
                    return
                self._note(failure)
                if self._must_end or self._has_given_up or time.monotonic() >= deadline:
                    self._give_up(_cause(failure))
                    return
                self._changed.wait_for(lambda: self._must_end, self._limits.retry_interval)

    def _attempt(self, batch: list[Command]) -> tuple[list[Rejected], BaseException | None]:
        """Write the batch once: the rows that were refused, or why nothing was written."""
        with self._changed:
            lossy_runs = self._results.lossy_runs()
        try:
            return self._writer.write(batch, lossy_runs), None
        except _FAILURES as error:
            self._writer.disconnect()
            return [], error
        except Exception as error:
            # A fault of ours in one batch must not end the log.
            logger.exception("The log could not be written")
            return [Rejected(command, repr(error)) for command in batch], None

    def _note(self, failure: BaseException) -> None:
        if self._waiting is None:
            logger.warning("The log cannot be written now: %s", failure)
        self._waiting = _cause(failure)

    def _give_up(self, reason: str) -> None:
        """Lose everything that waits; the next row tries the log once more."""
        self._waiting, self._has_given_up = None, True
        self._num_lost += len(self._pending)
        self._num_done += len(self._pending)
        for command in self._pending:
            self._results.lose(command, reason)
        logger.error("%d rows of the log were lost: %s", len(self._pending), reason)
        self._pending.clear()
        self._changed.notify_all()

    def _settle(self, batch: list[Command], rejected: list[Rejected]) -> None:
        """The batch is committed: take it from the queue and tell those who wait for it."""
        self._waiting, self._has_given_up = None, False
        self._num_lost += len(rejected)
        for rejection in rejected:
            self._results.lose(rejection.command, rejection.reason)
        if rejected:
            logger.error("%d rows of the log were lost: %s", len(rejected), rejected[0].reason)
        for command in batch:
            self._pending.popleft()
            if isinstance(command, FinishRun):
                self._results.settle(command.event.run_id)
        self._num_done += len(batch)
        self._changed.notify_all()


def _cause(error: BaseException) -> str:
    return "another program holds its lock" if is_busy(error) else str(error).rstrip(".")
