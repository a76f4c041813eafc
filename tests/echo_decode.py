"""What a scripted run emits: every kind of event, with the pace, the failures and the texts of its Script."""

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

from saguaro_core.config import GenerationRequest, Mode
from saguaro_core.events import (
    DRAFT_LOST,
    Alternative,
    CacheOutcome,
    Event,
    FallbackKind,
    Lane,
    Notice,
    Origin,
    PhaseEvent,
    PreparedOutcome,
    RoundEvent,
    RunFinished,
    RunStarted,
    SpanEvent,
    SpanKind,
    Status,
    StopReason,
    TokenEvent,
)
from saguaro_core.figures import FiguresAccumulator
from saguaro_core.run_figures import RunFigures

STORY = (
    "A cactus does not hurry. It stands where the rain left it,\nand it prepares, "
    "quietly, for every rain that might come."
    "\n\n1. Guess what happens next.\n2. Prepare an answer for each guess.\n3. When the rain comes, drink.\n\n"
    "def ready(rain):\n    return rain in prepared  # no waiting\n\nThat is all there is to it. "
)
SPEED: Mapping[Mode, float] = {"ar": 1.0, "sd": 1.5, "ssd": 2.2}


def pieces_of(text: str) -> list[str]:
    """Cut a text into token-like pieces: a space and a word, or single other characters."""
    pieces: list[str] = []
    for character in text:
        if pieces and character.isalnum() and (pieces[-1][-1].isalnum() or pieces[-1] == " "):
            pieces[-1] += character
        else:
            pieces.append(character)
    return pieces


def token_id(piece: str) -> int:
    """A stable made-up id for a piece."""
    return zlib.crc32(piece.encode()) % 49_152


@dataclass
class Script:
    """How an EchoEngine behaves. `rate` is AR's tokens a second; None sends without any pause.

    `fail_at[mode]` raises after that many tokens. `differ_at[mode]` changes one token's text at that index.
    """

    text: str = STORY
    pieces: list[str] | None = None
    rate: float | None = 40.0
    prefill_seconds: float = 0.05
    load_seconds: float = 0.0
    load_error: str | None = None
    draft_error: str | None = None
    fail_at: dict[Mode, int] = field(default_factory=dict)
    differ_at: dict[Mode, int] = field(default_factory=dict)
    endless: bool = True
    speed: Mapping[Mode, float] = field(default_factory=lambda: dict(SPEED))
    notice: str | None = None
    lost_draft: tuple[Mode, ...] = ()


@dataclass
class EchoRun:
    """A run in the queue."""

    run_id: str
    request: GenerationRequest
    on_event: Callable[[Event], None]
    stopped: threading.Event = field(default_factory=threading.Event)


class _LaneError(Exception):
    """The script says that the lane fails here."""


def finished(
    run: EchoRun, status: Status, reason: StopReason, events: list[Event], now: float, error: str | None = None
) -> RunFinished:
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    return RunFinished(
        run_id=run.run_id, status=status, stop_reason=reason, time=now, text="".join(t.text for t in tokens),
        token_ids=tuple(t.token_id for t in tokens), error=error, figures=figures_of(run.request.mode, events, now),
    )  # fmt: skip


def figures_of(mode: Mode, events: list[Event], now: float) -> RunFigures:
    """The figures of a scripted run, by the engine's own accumulator."""
    accumulator = FiguresAccumulator(mode, num_devices=2)
    for event in events:
        accumulator.add(event)
    return accumulator.figures(now)


class EchoDecode:
    """One scripted run."""

    def __init__(self, script: Script, run: EchoRun, on_round: Callable[[], None]) -> None:
        self.script, self.request_run, self.on_round = script, run, on_round
        self.request = run.request
        self.mode = run.request.mode
        self.random = Random(f"{self.mode}{self.request.sampling.seed}")
        self.tokens: list[TokenEvent] = []
        self.events: list[Event] = []
        self.num_rounds = 0
        self.now = 0.0

    def emit(self, event: Event) -> None:
        self.events.append(event)
        self.request_run.on_event(event)

    def run(self) -> None:
        run_id, prompt = self.request_run.run_id, self.request.messages[-1].content
        ids = tuple(token_id(piece) for piece in pieces_of(prompt))
        self.emit(RunStarted(run_id=run_id, started_at=time.time(), prompt=prompt, prompt_token_ids=ids))
        status: Status = "finished"
        reason: StopReason = "eos"
        error = None
        try:
            reason = self._answer()
            status = "stopped" if reason == "user" else "finished"
        except _LaneError as failure:
            status, reason, error = "failed", "error", str(failure)
        self.emit(finished(self.request_run, status, reason, self.events, self.now, error))

    def _answer(self) -> StopReason:
        if self.mode != "ar" and self.script.draft_error:
            raise _LaneError(f"no draft model is loaded: {self.script.draft_error}")
        self._prefill()
        pieces = self._pieces()
        cap = self.request.sampling.max_new_tokens
        pending = next(pieces, None)
        while pending is not None:
            if self.request_run.stopped.is_set():
                return "user"
            pending = self._round(pending, pieces, cap)
            if len(self.tokens) >= cap:
                return "length"
        return "eos"

    def _pieces(self) -> Iterator[str]:
        base = self.script.pieces if self.script.pieces is not None else pieces_of(self.script.text)
        while True:
            yield from base
            if not self.script.endless:
                return

    def _prefill(self) -> None:
        run_id = self.request_run.run_id
        for step in range(4):
            self.emit(PhaseEvent(run_id=run_id, phase="prefill", time=self.now, progress=step / 4))
            self._advance(self.script.prefill_seconds / 4)
        self.emit(SpanEvent(run_id=run_id, lane="target", kind="prefill", start=0.0, end=self.now))
        self.emit(PhaseEvent(run_id=run_id, phase="decode", time=self.now))
        if self.script.notice:
            self.emit(Notice(run_id=run_id, message=self.script.notice, time=self.now))
        if self.mode in self.script.lost_draft:
            self.emit(Notice(run_id=run_id, message=f"{DRAFT_LOST}: it was killed.", time=self.now))

    def _advance(self, seconds: float) -> None:
        if self.script.rate is not None:
            self.request_run.stopped.wait(seconds)
        self.now += seconds

    def _round(self, pending: str | None, pieces: Iterator[str], cap: int) -> str | None:
        self.on_round()
        drafted = 0 if self.mode == "ar" else self.request.speculation.lookahead
        accepted = min(drafted, int(drafted * self.random.random() * 1.6))
        index = self.num_rounds
        cache, fallback = self._cache_outcome(index)
        seconds = (1 + accepted) / ((self.script.rate or 400.0) * self.script.speed[self.mode])
        start = self.now
        self._advance(seconds)
        self._spans(index, start, cache, fallback)
        committed = 0
        while pending is not None and committed <= accepted and len(self.tokens) < cap:
            self._token(pending, index, committed, self._origin(committed, accepted, cache))
            committed += 1
            pending = next(pieces, None)
        bonus = self.tokens[-1].token_id
        round_event = RoundEvent(
            run_id=self.request_run.run_id, index=index, drafted=drafted, accepted=min(accepted, committed),
            bonus_token_id=bonus, start=start, verify_ms=seconds * 800, cache=cache, fallback=fallback,
            draft_ms=seconds * 150 if drafted else 0.0, wait_ms=0.0 if cache == "hit" or not drafted else seconds * 200,
            fan_out=(4, 3, 2, 3) if cache else (), num_committed=committed,
            prepared=(PreparedOutcome(accepted=0, token_ids=(11, 12)),) if cache else (),
        )  # fmt: skip
        self.num_rounds += 1
        self.emit(round_event)
        return pending

    def _cache_outcome(self, index: int) -> tuple[CacheOutcome | None, FallbackKind | None]:
        if self.mode != "ssd":
            return None, None
        if index == 0:
            return "compulsory", "neural"
        if self.random.random() < 0.75:
            return "hit", None
        return "miss", "neural"

    def _origin(self, place: int, accepted: int, cache: CacheOutcome | None) -> Origin:
        if self.mode == "ar":
            return "target"
        if place >= accepted:
            return "bonus"
        if self.mode == "sd":
            return "draft"
        return "cache_hit" if cache == "hit" else "fallback"

    def _token(self, piece: str, round_index: int, place: int, origin: Origin) -> None:
        index = len(self.tokens)
        if self.script.fail_at.get(self.mode) == index:
            raise _LaneError(f"the {self.mode} lane was told to fail at token {index}")
        text = piece + "?" if self.script.differ_at.get(self.mode) == index else piece
        p = self.random.uniform(0.3, 1.0)
        event = TokenEvent(
            run_id=self.request_run.run_id, index=index, token_id=token_id(text), text=text, time=self.now,
            round_index=round_index, place=place, origin=origin, p=p,
            q=None if origin == "target" else self.random.uniform(0.1, 1.0),
            alternatives=(
                Alternative(token_id=token_id(text), text=text, p=p),
                Alternative(token_id=7, text=" other", p=(1 - p) / 2),
            ),
        )  # fmt: skip
        self.tokens.append(event)
        self.emit(event)

    def _spans(self, index: int, start: float, cache: CacheOutcome | None, fallback: FallbackKind | None) -> None:
        end, length = self.now, self.now - start
        if self.mode == "sd":
            self._span("draft", "step", start, start + length / 4, index)
            self._span("target", "wait", start, start + length / 4, index)
            start += length / 4
        if fallback is not None:
            self._span("draft", "fallback", start, start + length / 5, index)
            self._span("target", "wait", start, start + length / 5, index)
            start += length / 5
        if cache is not None:
            self._span("draft", "build", start, start + (end - start) * 0.9, index)
        self._span("target", "verify", start, end, index)

    def _span(self, lane: Lane, kind: SpanKind, start: float, end: float, index: int) -> None:
        run_id = self.request_run.run_id
        self.emit(SpanEvent(run_id=run_id, lane=lane, kind=kind, start=start, end=end, round_index=index))
