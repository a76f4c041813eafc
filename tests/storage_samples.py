"""Runs for the storage tests: a small complete SSD run and the helpers that record and count it."""

import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from saguaro_core.config import GenerationRequest, Message, Mode, SamplingParams
from saguaro_core.events import (
    Alternative,
    Event,
    Notice,
    PhaseEvent,
    PreparedOutcome,
    RoundEvent,
    RunFinished,
    RunStarted,
    SpanEvent,
    Status,
    StopReason,
    TokenEvent,
)
from saguaro_core.figures import FiguresAccumulator
from saguaro_core.status import EngineInfo, ModelInfo
from storage import Recorder

ROOT = Path(__file__).resolve().parent.parent
TABLES = ("comparisons", "runs", "rounds", "tokens", "spans", "notices")


def make_info() -> EngineInfo:
    target = ModelInfo(
        name="target-135m",
        revision="abc123",
        dtype="float16",
        device="cpu:0",
        num_parameters=135_000_000,
        vocabulary_size=49_152,
        context_length=8192,
        memory_bytes=270_000_000,
    )
    return EngineInfo(
        target=target,
        draft=replace(target, name="draft-9m", device="cpu:1"),
        draft_error=None,
        context_length=8192,
        num_devices=2,
        hardware="Test CPU, 2 cores",
        versions={"torch": "2.13.0", "transformers": "5.24.0"},
    )


def make_request(prompt: str = "Tell me about cacti.", mode: Mode = "ssd", seed: int = 7) -> GenerationRequest:
    return GenerationRequest(
        messages=(Message(role="user", content=prompt),), mode=mode, sampling=SamplingParams(seed=seed)
    )


def make_round(run_id: str, index: int) -> list[Event]:
    """The two tokens, the round and the two spans of one round."""
    start = 0.1 * (index + 1)
    tokens: list[Event] = [
        TokenEvent(
            run_id=run_id,
            index=2 * index + place,
            token_id=100 + 2 * index + place,
            text=f" w{2 * index + place}",
            time=start + 0.08,
            round_index=index,
            place=place,
            origin="bonus" if place else "cache_hit",
            p=0.5,
            q=0.25,
            alternatives=(Alternative(token_id=1, text=" a", p=0.5), Alternative(token_id=2, text="<b>", p=0.125)),
        )
        for place in range(2)
    ]
    return [
        SpanEvent(run_id=run_id, lane="target", kind="verify", start=start, end=start + 0.08, round_index=index),
        SpanEvent(run_id=run_id, lane="draft", kind="build", start=start, end=start + 0.06, round_index=index),
        *tokens,
        RoundEvent(
            run_id=run_id,
            index=index,
            drafted=3,
            accepted=1,
            bonus_token_id=101 + 2 * index,
            start=start,
            verify_ms=80.0,
            draft_ms=5.0,
            wait_ms=0.5,
            cache="hit" if index else "compulsory",
            fallback=None if index else "neural",
            fan_out=(4, 3, 2, 3),
            prepared=(PreparedOutcome(accepted=0, token_ids=(5, 6)), PreparedOutcome(accepted=1, token_ids=(7,))),
            num_committed=2,
        ),
    ]


def make_events(
    run_id: str,
    num_rounds: int = 3,
    *,
    mode: Mode = "ssd",
    status: Status = "finished",
    stop_reason: StopReason = "eos",
    error: str | None = None,
    text: str | None = None,
) -> list[Event]:
    """A whole run, in the order an engine emits it."""
    events: list[Event] = [
        PhaseEvent(run_id=run_id, phase="prefill", time=0.0),
        RunStarted(run_id=run_id, started_at=1_764_444_444.125, prompt="<|im_start|>user\nhi", prompt_token_ids=(1, 9)),
        SpanEvent(run_id=run_id, lane="target", kind="prefill", start=0.0, end=0.09),
        Notice(run_id=run_id, message="the draft was lost & found", time=0.05),
    ]
    for index in range(num_rounds):
        events += make_round(run_id, index)
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    accumulator = FiguresAccumulator(mode, num_devices=2)
    for event in events:
        accumulator.add(event)
    finished = RunFinished(
        run_id=run_id,
        status=status,
        stop_reason=stop_reason,
        time=1.0,
        text="".join(token.text for token in tokens) if text is None else text,
        token_ids=tuple(token.token_id for token in tokens),
        figures=accumulator.figures(1.0),
        error=error,
    )
    return [*events, finished]


def start(recorder: Recorder, comparison_id: str, run_ids: Sequence[str], request: GenerationRequest) -> None:
    """Start a comparison and its runs, all with the same request."""
    recorder.start_comparison(comparison_id, request.messages, request.settings())
    for run_id in run_ids:
        recorder.start_run(run_id, comparison_id, request, make_info())


def record_comparison(
    recorder: Recorder, comparison_id: str, prompt: str = "Tell me about cacti.", *, modes: Sequence[Mode] = ("ssd",)
) -> list[str]:
    """Record finished runs of these modes and return their ids, once they are saved."""
    request = make_request(prompt)
    recorder.start_comparison(comparison_id, request.messages, request.settings())
    run_ids = []
    for mode in modes:
        run_ids.append(run_id := f"{comparison_id}-{mode}")
        recorder.start_run(run_id, comparison_id, make_request(prompt, mode), make_info())
        record_all(recorder, make_events(run_id, mode=mode))
    assert all(recorder.wait_saved(run_id, 10) for run_id in run_ids)
    return run_ids


def record_all(recorder: Recorder, events: Sequence[Event]) -> None:
    for event in events:
        recorder.record(event)


def count_rows(path: Path) -> dict[str, int]:
    """Rows per table, read by a connection of its own."""
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    try:
        return {table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in TABLES}
    finally:
        connection.close()


def dump(path: Path) -> list[str]:
    """The whole content of a database as SQL, to see that nothing changed."""
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    try:
        return list(connection.iterdump())
    finally:
        connection.close()


def query(path: Path, sql: str, *parameters: object) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    try:
        return connection.execute(sql, parameters).fetchall()
    finally:
        connection.close()


def start_process(code: str, *arguments: object) -> "subprocess.Popen[str]":
    """A real second process that runs this code with these arguments; it talks through its standard streams."""
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n{code}"]
        + [str(argument) for argument in arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def end_process(process: "subprocess.Popen[str]", end: Callable[["subprocess.Popen[str]"], None]) -> int:
    """End a process in the given way, wait for it, and close its streams."""
    end(process)
    code = process.wait(30)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    return code
