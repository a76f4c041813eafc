"""The log as a running program sees it: `record` takes an event and returns at once, one thread writes.

A log that fails never stops a run. While it fails, rows wait in a bounded queue and the thread tries again; it gives
up after a while, says so in `problem`, and starts anew as soon as the file can be written.
"""

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from saguaro_core.config import GenerationRequest, Message
from saguaro_core.events import Event, Notice, PhaseEvent, RunFinished, SpanEvent
from saguaro_core.status import EngineInfo
from storage.commands import Command, DeleteComparison, FinishRun, NumberedEvent, StartComparison, StartRun, run_of
from storage.database import is_busy, open_for_writing, resolve_path
from storage.errors import SchemaRefused, StorageError
from storage.results import SaveResults
from storage.writer import LogWriter, Rejected

logger = logging.getLogger(__name__)

_BATCH = 2000
_RESERVE = 1000
_FAILURES = (sqlite3.Error, OSError, StorageError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderLimits:
    """Times in seconds. `commit_interval` bounds what a killed process loses; `give_up_after` how long rows wait for a
    log that fails; `max_pending` how many rows wait at most."""

    commit_interval: float = 0.1
    busy_timeout: float = 1.0
    retry_interval: float = 0.2
    give_up_after: float = 120.0
    max_pending: int = 50_000


@dataclass(slots=True)
class _OpenRun:
    """A run that is being recorded, and the next places of its spans and notices."""

    comparison_id: str
    num_spans: int = 0
    num_notices: int = 0


class Recorder:
    """Records comparisons and runs. Thread-safe; nothing but the constructor raises.

    The constructor brings the schema up to date. It raises SchemaRefused for a file that must not be touched; any
    other failure shows in `problem` and is tried again.
    """

    def __init__(self, path: str | Path | None = None, *, limits: RecorderLimits | None = None) -> None:
        self.path = resolve_path(path)
        self._limits = limits or RecorderLimits()
        self._writer = LogWriter(self.path, self._limits.busy_timeout)
        self._changed = threading.Condition()
        self._urgent = threading.Event()
        self._pending: deque[Command] = deque()
        self._open: dict[str, _OpenRun] = {}
        self._results = SaveResults()
        # The first thing to be done is to mark the runs of dead processes.
        self._num_queued, self._num_done, self._num_lost = 1, 0, 0
        self._waiting: str | None = None
        self._is_closing = self._must_end = self._has_given_up = False
        self._prepare()
        self._thread = threading.Thread(target=self._run, name="saguaro-log", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def problem(self) -> str | None:
        """Why rows wait or were lost, for the user; None again once a later run was saved whole."""
        with self._changed:
            if self._waiting is not None:
                return f"The log {self.path} cannot be written now: {self._waiting}. Runs go on; their rows wait."
            if self._results.loss is not None:
                return f"Rows of the log {self.path} were lost: {self._results.loss}. Runs go on."
            return None

    def start_comparison(
        self,
        comparison_id: str,
        messages: Sequence[Message],
        settings: Mapping[str, Any],
        *,
        title: str | None = None,
        created_at: float | None = None,
    ) -> None:
        """Record a prompt that is about to be sent. `settings` is plain JSON data."""
        with self._changed:
            self._put(
                StartComparison(
                    comparison_id=comparison_id,
                    messages=tuple(messages),
                    settings=dict(settings),
                    title=title,
                    created_at=time.time() if created_at is None else created_at,
                )
            )

    def start_run(
        self,
        run_id: str,
        comparison_id: str,
        request: GenerationRequest,
        info: EngineInfo,
        *,
        queued_at: float | None = None,
    ) -> None:
        """Record a run of that comparison when it is queued; its events follow through `record`."""
        queued = time.time() if queued_at is None else queued_at
        with self._changed:
            self._open[run_id] = _OpenRun(comparison_id)
            self._put(
                StartRun(run_id=run_id, comparison_id=comparison_id, request=request, info=info, queued_at=queued)
            )

    def record(self, event: Event) -> None:
        """Take one event of a started run. Never blocks, never raises; events of other runs are ignored."""
        with self._changed:
            run = self._open.get(event.run_id)
            if run is None or isinstance(event, PhaseEvent):
                return
            match event:
                case RunFinished():
                    del self._open[event.run_id]
                    self._put(FinishRun(event=event, finished_at=time.time()))
                case SpanEvent():
                    self._put(NumberedEvent(event=event, place=run.num_spans))
                    run.num_spans += 1
                case Notice():
                    self._put(NumberedEvent(event=event, place=run.num_notices))
                    run.num_notices += 1
                case _:
                    self._put(event)

    def wait_saved(self, run_id: str, timeout: float | None = None) -> bool:
        """Wait until the finished run is committed. False: rows of it were lost, or the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: self._results.is_known(run_id) or self._has_ended, timeout)
            return self._results.is_saved(run_id)

    def delete_comparison(self, comparison_id: str, timeout: float | None = 5.0) -> bool:
        """Delete a comparison with its runs and rows; what its runs still emit is ignored. True once committed."""
        with self._changed:
            for run_id in [run_id for run_id, run in self._open.items() if run.comparison_id == comparison_id]:
                del self._open[run_id]
            self._put(DeleteComparison(comparison_id=comparison_id))
            self._urgent.set()
        return self.flush(timeout)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything recorded so far is committed. False: something was lost, or the time is up."""
        with self._changed:
            goal, num_lost = self._num_queued, self._num_lost
            self._urgent.set()
            is_done = self._changed.wait_for(lambda: self._num_done >= goal or self._has_ended, timeout)
            return is_done and self._num_done >= goal and self._num_lost == num_lost

    def close(self, timeout: float = 10.0) -> None:
        """Commit what waits, mark unfinished runs as interrupted, end the thread. Idempotent.

        A log that still fails after `timeout` is given up.
        """
        with self._changed:
            self._is_closing = True
            self._urgent.set()
            self._changed.notify_all()
        self._thread.join(timeout)
        with self._changed:
            self._must_end = True
            self._changed.notify_all()
        self._thread.join(self._limits.busy_timeout + 1.0)

    @property
    def _has_ended(self) -> bool:
        return not self._thread.is_alive()

    def _prepare(self) -> None:
        try:
            open_for_writing(self.path, self._limits.busy_timeout).close()
        except SchemaRefused:
            raise
        except _FAILURES as error:
            self._waiting = _cause(error)

    def _put(self, command: Command) -> None:
        """Queue a command; the caller holds the lock. A full queue loses the row, and the run is marked."""
        run_id = run_of(command)
        is_row = not isinstance(command, (StartComparison, StartRun, FinishRun, DeleteComparison))
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

    def _run(self) -> None:
        self._store([])
        with self._changed:
            self._num_done += 1
            self._changed.notify_all()
        while batch := self._next_batch():
            self._store(batch)
        self._writer.close()
        with self._changed:
            self._changed.notify_all()

    def _next_batch(self) -> list[Command]:
        """The oldest rows, gathered for one commit interval; empty when the recorder closes."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._is_closing)
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
            try:
                with self._changed:
                    lossy_runs = self._results.lossy_runs()
                rejected = self._writer.write(batch, lossy_runs)
            except _FAILURES as error:
                self._writer.disconnect()
                if self._must_wait(error, deadline):
                    continue
                return
            except Exception as error:
                logger.exception("The log could not be written")
                rejected = [Rejected(command, repr(error)) for command in batch]
            self._settle(batch, rejected)
            return

    def _must_wait(self, error: BaseException, deadline: float) -> bool:
        """Say what fails and wait a little; False when the rows were given up."""
        reason = _cause(error)
        with self._changed:
            if self._waiting is None:
                logger.warning("The log %s cannot be written now: %s", self.path, reason)
            self._waiting = reason
            if not self._must_end and not self._has_given_up and time.monotonic() < deadline:
                self._changed.wait_for(lambda: self._must_end, self._limits.retry_interval)
                return True
            self._give_up(reason)
            return False

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
        with self._changed:
            self._waiting, self._has_given_up = None, False
            for rejection in rejected:
                self._num_lost += 1
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
