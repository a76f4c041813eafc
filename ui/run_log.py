"""The page's view of the log: recording through the one writer, and stored comparisons as the page shows them."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any, cast

from saguaro_core.config import GenerationRequest, Mode
from saguaro_core.events import Event, RunFinished, Status
from saguaro_core.run_figures import RunFigures
from saguaro_core.status import EngineInfo
from storage import (
    ExportFile,
    ExportFormat,
    HistoryEntry,
    LogReader,
    NotStored,
    Recorder,
    RunDetail,
    RunSummary,
    Selection,
    StoredRun,
    StoredStatus,
    export,
)
from ui.comparisons import Comparison
from ui.lane import LaneState
from ui.summary import LOST_DRAFT

PAGE_SIZE = 20


class StoredRunLog:
    """Records what runs emit, and reads it back. The recorder belongs to whoever made it."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.reader = LogReader(recorder.path)

    @property
    def problem(self) -> str | None:
        """Why the log does not follow, or None."""
        return self.recorder.problem

    def started(self, comparison: Comparison, requests: Mapping[Mode, GenerationRequest], info: EngineInfo) -> None:
        """Record a comparison and its queued runs."""
        messages = next(iter(requests.values())).messages
        self.recorder.start_comparison(
            comparison.comparison_id, messages, comparison.settings, created_at=comparison.created
        )
        for mode, request in requests.items():
            self.recorder.start_run(comparison.lanes[mode].run_id, comparison.comparison_id, request, info)

    def record(self, event: Event) -> None:
        self.recorder.record(event)

    def load(self, comparison_id: str) -> Comparison | None:
        """A stored comparison, or None if there is none of that id. Raises StorageError if it cannot be read."""
        try:
            stored = self.reader.comparison(comparison_id)
            lanes = {run.mode: _lane(self.reader.run(run.id)) for run in stored.runs}
        except NotStored:
            return None
        return Comparison(stored.id, stored.prompt, stored.settings, lanes, _unix(stored.created_at))

    def export(self, selection: Selection, form: str) -> ExportFile:
        """A download of what is stored so far. Raises NotStored, InvalidRequest or StorageError."""
        self.recorder.flush(1.0)
        return export(self.reader, selection, cast(ExportFormat, form))

    def delete(self, comparison_id: str) -> bool:
        """Delete a comparison with all it holds; False when that is not committed yet."""
        return self.recorder.delete_comparison(comparison_id)

    def history(self, text: str, mode: Mode | None, status: StoredStatus | None, before: int | None) -> dict[str, Any]:
        """One page of the list, newest first, as plain data for the page."""
        self.recorder.flush(1.0)
        page = self.reader.history(text, mode=mode, status=status, before=before, limit=PAGE_SIZE)
        return {
            "rows": [_history_row(entry) for entry in page.entries],
            "total": page.total,
            "before": before,
            "next": page.next_before,
            "filtered": bool(text.strip() or mode or status),
        }


def _lane(detail: RunDetail) -> LaneState:
    run = detail.run
    lane = LaneState(run.id, run.mode, run.engine.get("num_devices", 1))
    events: list[Event] = [*detail.notices, *detail.spans, *detail.rounds, *detail.tokens]
    for event in events:
        lane.apply(event)
    if run.status in ("running", "interrupted"):
        lane.mark(run.status)
    else:
        lane.apply(_finished(run))
    return lane


def _finished(run: StoredRun) -> RunFinished:
    return RunFinished(
        run_id=run.id,
        status=cast(Status, run.status),
        stop_reason=run.stop_reason or "error",
        time=0.0,
        text=run.answer,
        token_ids=run.answer_token_ids,
        figures=run.figures or RunFigures(),
        error=run.error,
    )


def _history_row(entry: HistoryEntry) -> dict[str, Any]:
    speeds = {run.mode: run.decode_tokens_per_second for run in entry.runs if run.status == "finished"}
    ssd, ar = speeds.get("ssd"), speeds.get("ar")
    is_lost = any(run.has_lost_draft for run in entry.runs if run.mode == "ssd")
    return {
        "id": entry.id,
        "title": entry.title,
        "created": _unix(entry.created_at),
        "runs": [_run_row(run) for run in entry.runs],
        "speed_up": ssd / ar if ssd and ar and not is_lost else None,
        "no_speed_up": LOST_DRAFT if is_lost else None,
    }


def _run_row(run: RunSummary) -> dict[str, Any]:
    values = asdict(run)
    return {name: values[name] for name in ("mode", "status", "error")} | {"rate": run.decode_tokens_per_second}


def _unix(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
