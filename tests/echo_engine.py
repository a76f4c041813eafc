"""A scripted engine with the real client's interface: every kind of event at a settable rate, no model.

It serves the page's tests, which need odd situations on demand: failing lanes, 500 tokens a second, hostile text.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from echo_decode import EchoDecode, EchoRun, Script, finished

from saguaro_core.config import EngineConfig, GenerationRequest
from saguaro_core.errors import EngineUnavailable, ModelError
from saguaro_core.events import Event
from saguaro_core.status import EngineInfo, EngineStatus, ModelInfo

__all__ = ["EchoEngine", "Script"]


class EchoEngine:
    """The Engine interface over a Script; one worker thread decodes one run at a time."""

    def __init__(
        self,
        script: Script | None = None,
        config: EngineConfig | None = None,
        *,
        on_status: Callable[[EngineStatus], None] | None = None,
    ) -> None:
        self.script = script or Script()
        self.config = config or EngineConfig()
        self.num_rounds_made = 0
        self._on_status = on_status
        self._status = EngineStatus(state="starting", message="Starting the engine")
        self._queue: deque[EchoRun] = deque()
        self._known: dict[str, EchoRun] = {}
        self._wake = threading.Condition()
        self._closed = False
        self._worker: threading.Thread | None = None

    def __enter__(self) -> "EchoEngine":
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def status(self) -> EngineStatus:
        return self._status

    def start(self) -> None:
        if self._worker is not None:
            return
        self._worker = threading.Thread(target=self._work, daemon=True, name="echo-engine")
        self._worker.start()

    def wait_ready(self, timeout: float | None = None) -> EngineInfo:
        deadline = time.monotonic() + (timeout if timeout is not None else 60.0)
        while time.monotonic() < deadline:
            if self._status.state == "failed":
                raise ModelError(self._status.message)
            if self._status.info is not None:
                return self._status.info
            time.sleep(0.005)
        raise EngineUnavailable("the echo engine did not become ready in time")

    def submit(self, run_id: str, request: GenerationRequest, on_event: Callable[[Event], None]) -> None:
        if self._status.state != "ready":
            raise EngineUnavailable(f"the engine is {self._status.state}: {self._status.message}")
        run = EchoRun(run_id, request, on_event)
        with self._wake:
            self._queue.append(run)
            self._known[run_id] = run
            self._wake.notify()

    def stop(self, run_id: str) -> None:
        with self._wake:
            run = self._known.get(run_id)
            if run is not None:
                run.stopped.set()
            if run is not None and run in self._queue:
                self._queue.remove(run)
                run.on_event(finished(run, "stopped", "user", [], 0.0))

    def close(self) -> None:
        with self._wake:
            self._closed = True
            for run in self._known.values():
                run.stopped.set()
            self._wake.notify_all()
        if self._worker is not None:
            self._worker.join(timeout=5)
        self._set_status(EngineStatus(state="closed", message="The engine was closed"))

    def _set_status(self, status: EngineStatus) -> None:
        self._status = status
        if self._on_status is not None:
            self._on_status(status)

    def _work(self) -> None:
        self._load()
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or bool(self._queue))
                if self._closed:
                    return
                run = self._queue.popleft()
            EchoDecode(self.script, run, self._count_round).run()

    def _count_round(self) -> None:
        self.num_rounds_made += 1

    def _load(self) -> None:
        steps = 20
        for step in range(steps if self.script.load_seconds else 0):
            self._set_status(
                EngineStatus(state="loading", message="Reading the target's weights", progress=step / steps)
            )
            time.sleep(self.script.load_seconds / steps)
            if self._closed:
                return
        if self.script.load_error:
            self._set_status(EngineStatus(state="failed", message=self.script.load_error))
            return
        self._set_status(EngineStatus(state="ready", message="Ready", progress=1.0, info=self._info()))

    def _info(self) -> EngineInfo:
        target = ModelInfo(
            name=self.config.target, revision="1", dtype="float16", device="cpu:0", num_parameters=134_515_008,
            vocabulary_size=49_152, context_length=8192, memory_bytes=269_030_016,
        )  # fmt: skip
        draft = ModelInfo(
            name=self.config.draft, revision="1", dtype="float16", device="cpu:1", num_parameters=9_000_000,
            vocabulary_size=16_384, context_length=8192, memory_bytes=18_000_000, note="trimmed vocabulary",
        )  # fmt: skip
        return EngineInfo(
            target=target, draft=None if self.script.draft_error else draft, draft_error=self.script.draft_error,
            context_length=8192, num_devices=2, hardware="Echo CPU, 2 cores",
            versions={"torch": "2.13.0", "transformers": "5.24.0"}, notes=("scripted answers, no model",),
        )  # fmt: skip
