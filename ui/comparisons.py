"""Running comparisons: one prompt through several lanes, owned by the engine and followed by any number of readers.

All runs of a comparison enter the engine's queue together, in the order ar, sd, ssd, with the settings they started
with; nobody else's run comes between them. A reader may leave and come back: it asks for what lies beyond its cursor.
"""

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from saguaro_core.config import GenerationRequest, Mode
from saguaro_core.errors import EngineUnavailable, InvalidRequest, SaguaroError
from saguaro_core.events import Event, RunFinished
from saguaro_core.status import EngineInfo, EngineStatus
from ui.lane import Cursor, LaneState
from ui.settings import CompareSettings
from ui.summary import summarize

Cursors = Mapping[Mode, Cursor]
START: Cursor = (0, 0, 0)


class EngineClient(Protocol):
    """What the page needs of saguaro_core.engine.Engine."""

    @property
    def status(self) -> EngineStatus: ...
    def submit(self, run_id: str, request: GenerationRequest, on_event: Callable[[Event], None]) -> None: ...
    def stop(self, run_id: str) -> None: ...


class RunLog(Protocol):
    """Where comparisons are recorded and found again. Recording returns at once and never raises."""

    def started(
        self, comparison: "Comparison", requests: Mapping[Mode, GenerationRequest], info: EngineInfo
    ) -> None: ...
    def record(self, event: Event) -> None: ...
    def load(self, comparison_id: str) -> "Comparison | None": ...


class Comparison:
    """One prompt and its lanes; thread-safe."""

    def __init__(
        self,
        comparison_id: str,
        prompt: str,
        settings: Mapping[str, Any],
        lanes: Mapping[Mode, LaneState],
        created: float,
    ) -> None:
        self.comparison_id = comparison_id
        self.prompt = prompt
        self.settings = settings
        self.created = created
        self.lanes = lanes
        self.version = 0
        self._summary: tuple[list[str], dict[str, Any]] | None = None
        self._changed = threading.Condition()

    @property
    def is_active(self) -> bool:
        return any(lane.is_active for lane in self.lanes.values())

    def apply(self, mode: Mode, event: Event) -> None:
        """Take one event of the lane `mode`; wakes the followers."""
        with self._changed:
            self.lanes[mode].apply(event)
            self._bump()

    def wait(self, version: int, timeout: float) -> bool:
        """Wait until something is newer than `version`; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.version != version, timeout)

    def wait_ended(self, timeout: float) -> bool:
        """Wait until every lane has ended; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.is_active, timeout)

    def header(self) -> dict[str, Any]:
        """What never changes while the comparison runs."""
        return {
            "comparison_id": self.comparison_id,
            "prompt": self.prompt,
            "settings": dict(self.settings),
            "created": self.created,
            "modes": list(self.lanes),
        }

    def changes(self, cursors: Cursors) -> tuple[dict[str, Any], dict[Mode, Cursor], int]:
        """Everything beyond `cursors`, the cursors to ask with next time, and the version that this is."""
        with self._changed:
            lanes = {mode: lane.since(cursors.get(mode, START)) for mode, lane in self.lanes.items()}
            update = {"active": self.is_active, "lanes": lanes, "summary": self._summarize()}
            return update, {mode: lane.cursor() for mode, lane in self.lanes.items()}, self.version

    def snapshot(self) -> dict[str, Any]:
        """The public form: for each lane the whole text, the token ids and the figures."""
        with self._changed:
            lanes = {mode: _public(lane) for mode, lane in self.lanes.items()}
            return {"lanes": lanes, "comparison_id": self.comparison_id}

    def _summarize(self) -> dict[str, Any]:
        """The summary, made again only when a lane begins or ends: it compares whole answers."""
        phases = [lane.phase for lane in self.lanes.values()]
        if self._summary is None or self._summary[0] != phases:
            self._summary = phases, summarize(self.lanes, self.settings)
        return self._summary[1]

    def _bump(self) -> None:
        self.version += 1
        self._changed.notify_all()


def _public(lane: LaneState) -> dict[str, Any]:
    state = lane.state()
    return {
        "text": lane.text, "token_ids": lane.token_ids, "figures": state["figures"], "status": state["phase"],
        "stop_reason": state["stop_reason"], "error": state["error"], "run_id": lane.run_id,
    }  # fmt: skip


class ComparisonService:
    """Starts, finds, follows and stops comparisons. Thread-safe."""

    MAX_ACTIVE = 16
    MAX_KEPT = 24

    def __init__(self, engine: EngineClient, log: RunLog | None = None) -> None:
        self.engine = engine
        self.log = log
        self._comparisons: dict[str, Comparison] = {}
        self._lock = threading.Lock()

    def start(self, message: str, settings: CompareSettings) -> str:
        """Queue one run per mode and return the comparison's id. Raises a SaguaroError if nothing was started."""
        requests = {mode: settings.request(message, mode) for mode in settings.modes}
        info = self._require_ready()
        lanes = {mode: LaneState(uuid.uuid4().hex, mode, info.num_devices) for mode in requests}
        comparison = Comparison(uuid.uuid4().hex, message, settings.flat(), lanes, time.time())
        with self._lock:
            if len(active := [c for c in self._comparisons.values() if c.is_active]) >= self.MAX_ACTIVE:
                raise InvalidRequest(f"{len(active)} comparisons are waiting: stop one or wait for one to end.")
            self._comparisons[comparison.comparison_id] = comparison
            self._forget_old()
            if self.log is not None:
                self.log.started(comparison, requests, info)
            for mode, request in requests.items():
                self._submit(comparison, mode, request)
        return comparison.comparison_id

    def stop(self, comparison_id: str) -> None:
        """Stop every run of a comparison that has not ended; unknown ids are ignored."""
        comparison = self._comparisons.get(comparison_id)
        # The last lane first: a waiting lane must not start in the moment the running one ends.
        for lane in reversed(list(comparison.lanes.values())) if comparison else ():
            if lane.is_active:
                self.engine.stop(lane.run_id)

    def find(self, comparison_id: str) -> Comparison | None:
        """A comparison that runs, ran in this session, or is stored. May read the database."""
        live = self._comparisons.get(comparison_id)
        return live or (self.log.load(comparison_id) if self.log is not None else None)

    def is_active(self, comparison_id: str | None) -> bool:
        comparison = self._comparisons.get(comparison_id or "")
        return comparison is not None and comparison.is_active

    def active(self) -> list[Comparison]:
        """The comparisons that have not ended, in the order in which the engine answers them."""
        with self._lock:
            return [comparison for comparison in self._comparisons.values() if comparison.is_active]

    def forget(self, comparison_id: str) -> None:
        """Drop an ended comparison from memory, after it was deleted from the store."""
        with self._lock:
            self._comparisons.pop(comparison_id, None)

    def num_ahead(self, comparison: Comparison) -> int:
        """How many comparisons the engine answers before this one."""
        active = self.active()
        return active.index(comparison) if comparison in active else 0

    def follow(self, comparison_id: str, interval: float = 0.125) -> Iterator[dict[str, Any]]:
        """Yield snapshots, at most one per `interval`, the last one complete; at least two a second while it runs."""
        comparison = self.find(comparison_id)
        if comparison is None:
            raise InvalidRequest(f"comparison {comparison_id!r} is unknown: it may have been deleted.")
        while True:
            version, active = comparison.version, comparison.is_active
            yield comparison.snapshot()
            if not active:
                return
            time.sleep(interval)
            comparison.wait(version, 0.5)

    def _require_ready(self) -> EngineInfo:
        status = self.engine.status
        if status.state in ("starting", "loading"):
            progress = f", {status.progress:.0%}" if status.progress is not None else ""
            raise EngineUnavailable(
                f"The models are still loading ({status.message}{progress}): send again when the page says ready."
            )
        if status.state != "ready" or status.info is None:
            raise EngineUnavailable(f"The engine is {status.state}: {status.message}")
        return status.info

    def _submit(self, comparison: Comparison, mode: Mode, request: GenerationRequest) -> None:
        run_id = comparison.lanes[mode].run_id

        def on_event(event: Event) -> None:
            # The log first: whoever sees a run as ended must find it in the history.
            if self.log is not None:
                self.log.record(event)
            comparison.apply(mode, event)

        try:
            self.engine.submit(run_id, request, on_event)
        except SaguaroError as error:
            on_event(RunFinished.unstarted(run_id, str(error)))

    def _forget_old(self) -> None:
        ended = [key for key, c in self._comparisons.items() if not c.is_active]
        for key in ended[: max(0, len(ended) - self.MAX_KEPT)]:
            del self._comparisons[key]
