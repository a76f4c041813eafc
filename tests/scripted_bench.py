"""A scripted engine for the benchmark, and its command line called over it."""

import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from saguaro_core.bench import main
from saguaro_core.config import EngineConfig, GenerationRequest, Mode
from saguaro_core.errors import ModelError
from saguaro_core.events import (
    CacheOutcome,
    Event,
    Notice,
    RoundEvent,
    RunFinished,
    RunStarted,
    SpanEvent,
    SpanKind,
    TokenEvent,
)
from saguaro_core.figures import FiguresAccumulator
from saguaro_core.prompts import WARM_UP
from saguaro_core.status import EngineInfo, EngineStatus, ModelInfo

TARGET = ModelInfo(
    name="scripted",
    revision="1",
    dtype="float32",
    device="cpu:0",
    num_parameters=8,
    vocabulary_size=8,
    context_length=64,
    memory_bytes=32,
    cores=(0,),
)
INFO = EngineInfo(
    target=TARGET,
    draft=replace(TARGET, name="scripted-draft", device="cpu:1", cores=(1,)),
    draft_error=None,
    context_length=64,
    num_devices=2,
    hardware="a scripted machine",
    versions={"torch": "none"},
)
# Per mode: tokens per round, verify, and the span kind and length that the round waits for; times in seconds.
PACE: dict[Mode, tuple[int, float, SpanKind, float]] = {
    "ar": (1, 0.020, "wait", 0.0),
    "sd": (2, 0.025, "step", 0.025),
    "ssd": (2, 0.025, "fallback", 0.0),
}
SPEED = {"ar": 50.0, "sd": 40.0, "ssd": 80.0}


@dataclass
class ScriptedEngine:
    """Answers every request with tokens 0, 1, 2... in rounds of fixed length; knobs make it misbehave."""

    info: EngineInfo = INFO
    load_error: str | None = None
    fail_on: str | None = None
    hang: bool = False
    differ_in: Mode | None = None
    notice: str | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    is_closed: bool = False
    config: EngineConfig | None = None

    def factory(self, config: EngineConfig, on_status: Callable[[EngineStatus], None]) -> "ScriptedEngine":
        self.config = config
        on_status(EngineStatus(state="loading", message="Loading the script"))
        return self

    def start(self) -> None:
        """Nothing to start."""

    def wait_ready(self, timeout: float | None = None) -> EngineInfo:
        if self.load_error:
            raise ModelError(self.load_error)
        return self.info

    def process_id(self) -> int | None:
        return None

    def stop(self, run_id: str) -> None:
        self.stopped.append(run_id)

    def close(self) -> None:
        self.is_closed = True

    def submit_batch(self, requests: Mapping[str, GenerationRequest], on_event: Callable[[Event], None]) -> None:
        for run_id, request in requests.items():
            self.submit(run_id, request, on_event)

    def submit(self, run_id: str, request: GenerationRequest, on_event: Callable[[Event], None]) -> None:
        self.requests.append(request)
        if self.hang:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            return
        threading.Thread(target=self._decode, args=(run_id, request, on_event)).start()

    def _decode(self, run_id: str, request: GenerationRequest, on_event: Callable[[Event], None]) -> None:
        accumulator = FiguresAccumulator(request.mode, self.info.num_devices)
        events = list(self._events(run_id, request))
        for event in events:
            accumulator.add(event)
            on_event(event)
        token_ids = tuple(event.token_id for event in events if isinstance(event, TokenEvent))
        elapsed = max((event.time for event in events if isinstance(event, TokenEvent)), default=0.0)
        is_failure = self.fail_on == request.mode and request.messages[0].content != WARM_UP.text
        on_event(
            RunFinished(
                run_id=run_id,
                status="failed" if is_failure else "finished",
                stop_reason="error" if is_failure else "length",
                time=elapsed,
                text="",
                token_ids=token_ids,
                figures=accumulator.figures(elapsed),
                error="the script says so" if is_failure else None,
            )
        )

    def _events(self, run_id: str, request: GenerationRequest) -> list[Event]:
        per_round, verify, kind, draft_time = PACE[request.mode]
        events: list[Event] = [RunStarted(run_id=run_id, started_at=0.0, prompt="", prompt_token_ids=())]
        if self.notice:
            events.append(Notice(run_id=run_id, message=self.notice, time=0.0))
        now, num_tokens, cap = 1.0, 0, request.sampling.max_new_tokens
        for index in range(cap):
            if num_tokens == cap:
                break
            count = min(per_round, cap - num_tokens)
            events += self._spans(run_id, request.mode, index, now, kind)
            now += draft_time + verify
            events.append(_round(run_id, request.mode, index, count, verify, draft_time))
            for place in range(count):
                token_id = num_tokens + (10 if request.mode == self.differ_in and num_tokens == 3 else 0)
                events.append(_token(run_id, num_tokens, token_id, now, index, place))
                num_tokens += 1
        return events

    def _spans(self, run_id: str, mode: Mode, index: int, now: float, kind: SpanKind) -> list[Event]:
        _, verify, _, draft_time = PACE[mode]
        middle, end = now + draft_time, now + draft_time + verify
        spans: list[Event] = [
            SpanEvent(run_id=run_id, lane="target", kind="verify", start=middle, end=end, round_index=index)
        ]
        if mode != "ar":
            spans.append(SpanEvent(run_id=run_id, lane="draft", kind=kind, start=now, end=middle, round_index=index))
        if mode == "ssd":
            spans.append(SpanEvent(run_id=run_id, lane="draft", kind="build", start=now, end=end, round_index=index))
        return spans


def _round(run_id: str, mode: Mode, index: int, count: int, verify: float, wait: float) -> RoundEvent:
    cache: CacheOutcome = "hit" if index else "compulsory"
    return RoundEvent(
        run_id=run_id,
        index=index,
        drafted=count - 1,
        accepted=count - 1,
        bonus_token_id=0,
        start=0.0,
        verify_ms=1000 * verify,
        draft_ms=0.0,
        wait_ms=1000 * wait,
        cache=cache if mode == "ssd" else None,
        num_committed=count,
    )


def _token(run_id: str, index: int, token_id: int, time: float, round_index: int, place: int) -> TokenEvent:
    return TokenEvent(
        run_id=run_id,
        index=index,
        token_id=token_id,
        text="",
        time=time,
        round_index=round_index,
        place=place,
        origin="bonus",
    )


@dataclass(frozen=True)
class Outcome:
    """What a call of the command line left behind."""

    status: int
    out: str
    err: str
    data: dict[str, Any]


def command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], main: Callable[..., int] = main
) -> Callable[..., Outcome]:
    """A function that calls a command, the benchmark's, with an engine and arguments, and says what it left behind."""

    def call(engine: ScriptedEngine, *arguments: str) -> Outcome:
        file = tmp_path / "out.json"
        try:
            status = main([*arguments, "--json", str(file)], engine.factory)
        except SystemExit as error:
            status = int(str(error.code))
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        data = json.loads(file.read_text()) if file.exists() else {}
        return Outcome(status, captured.out, captured.err, data)

    return call
