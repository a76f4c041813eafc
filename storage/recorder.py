"""The log as a running program sees it: `record` takes an event and returns at once; a thread of its own writes.

A log that fails never stops a run: rows wait in a bounded queue, and `problem` says why.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saguaro_core.config import GenerationRequest, Message
from saguaro_core.events import Event, Notice, PhaseEvent, RunFinished, SpanEvent
from saguaro_core.status import EngineInfo
from storage.commands import DeleteComparison, FinishRun, NumberedEvent, StartComparison, StartRun
from storage.database import open_for_writing, resolve_path
from storage.errors import SchemaRefused, StorageError
from storage.log_thread import LogThread, RecorderLimits
from storage.writer import LogWriter

logger = logging.getLogger(__name__)


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
        limits = limits or RecorderLimits()
        self._lock = threading.Lock()
        self._open: dict[str, _OpenRun] = {}
        failure = _prepare(self.path, limits.busy_timeout)
        if failure is not None:
            logger.warning("The log %s cannot be written now: %s", self.path, str(failure) or repr(failure))
        self._thread = LogThread(LogWriter(self.path, limits.busy_timeout), limits, failure)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def problem(self) -> str | None:
        """Why rows wait or were lost, for the user; None again once a later run was saved whole."""
        if (waiting := self._thread.waiting) is not None:
            return f"The log {self.path} cannot be written now: {waiting}. Runs go on; their rows wait."
        if (loss := self._thread.loss) is not None:
            return f"Rows of the log {self.path} were lost: {loss}. Runs go on."
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
        """Record a prompt that is about to be sent. `settings` is plain JSON data; `created_at` is Unix time."""
        command = StartComparison(
            comparison_id=comparison_id,
            messages=tuple(messages),
            settings=deepcopy(dict(settings)),
            title=title,
            created_at=time.time() if created_at is None else created_at,
        )
        with self._lock:
            self._thread.put(command)

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
        command = StartRun(run_id=run_id, comparison_id=comparison_id, request=request, info=info, queued_at=queued)
        with self._lock:
            self._open[run_id] = _OpenRun(comparison_id)
            self._thread.put(command)

    def record(self, event: Event) -> None:
        """Take one event of a started run. Never blocks, never raises; events of other runs are ignored."""
        with self._lock:
            run = self._open.get(event.run_id)
            if run is None or isinstance(event, PhaseEvent):
                return
            match event:
                case RunFinished():
                    del self._open[event.run_id]
                    self._thread.put(FinishRun(event=event, finished_at=time.time()))
                case SpanEvent():
                    self._thread.put(NumberedEvent(event=event, place=run.num_spans))
                    run.num_spans += 1
                case Notice():
                    self._thread.put(NumberedEvent(event=event, place=run.num_notices))
                    run.num_notices += 1
                case _:
                    self._thread.put(event)

    def wait_saved(self, run_id: str, timeout: float | None = None) -> bool:
        """Wait until the finished run is committed. False: rows of it were lost, or the time is up."""
        return self._thread.wait_saved(run_id, timeout)

    def delete_comparison(self, comparison_id: str, timeout: float | None = 5.0) -> bool:
        """Delete a comparison with its runs and rows; what its runs still emit is ignored. True once committed."""
        with self._lock:
            for run_id in [run_id for run_id, run in self._open.items() if run.comparison_id == comparison_id]:
                del self._open[run_id]
            self._thread.put(DeleteComparison(comparison_id=comparison_id))
        return self.flush(timeout)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything recorded so far is committed. False: something was lost, or the time is up."""
        return self._thread.flush(timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Commit what waits, mark unfinished runs as interrupted, end the thread. Idempotent.

        A log that still fails after `timeout` is given up.
        """
        self._thread.close(timeout)


def _prepare(path: Path, busy_timeout: float) -> BaseException | None:
    """Bring the schema up to date; a failure that may pass is returned."""
    try:
        open_for_writing(path, busy_timeout).close()
    except SchemaRefused:
        raise
    except (sqlite3.Error, OSError, StorageError) as error:
        return error
    return None
