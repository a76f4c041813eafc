"""Turns what the loop did into events, and keeps the run's figures.

Everything here happens after the outcome was sent to the draft, off the path that the other device waits for.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from saguaro_core.config import GenerationRequest
from saguaro_core.decoding.sources import Proposal
from saguaro_core.decoding.stopping import AnswerBuilder, ReleasedToken
from saguaro_core.decoding.target import TargetSession, Verifier
from saguaro_core.draft.messages import DraftSpan
from saguaro_core.events import (
    Alternative,
    Event,
    Lane,
    Notice,
    Origin,
    Phase,
    PhaseEvent,
    PreparedOutcome,
    RoundEvent,
    RunFinished,
    SpanEvent,
    SpanKind,
    Status,
    StopReason,
    TokenEvent,
)
from saguaro_core.figures import FiguresAccumulator
from saguaro_core.verification import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedToken:
    """What is known of a token when its round commits it; its text may come later."""

    time: float
    round_index: int
    place: int
    origin: Origin
    p: float | None
    q: float | None
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What a run works with: its request, the target, observers and a clock. `piece` gives the text of one token id."""

    run_id: str
    request: GenerationRequest
    prompt: list[int]
    target: TargetSession
    verifier: Verifier
    answer: AnswerBuilder[CommittedToken]
    eos_token_ids: frozenset[int]
    piece: Callable[[int], str]
    emit: Callable[[list[Event]], None]
    should_stop: Callable[[], bool]
    num_devices: int
    prefill_chunk: int = 256
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One finished round as the loop saw it; times are absolute. `committed` are the accepted tokens and the bonus."""

    index: int
    proposal: Proposal
    outcome: Outcome
    logits: Tensor
    committed: list[int]
    bonus_origin: Origin
    started: float
    decided: float
    waited: float


class Reporter:
    """Emits one run's events in order and sums its figures."""

    def __init__(self, run: RunContext) -> None:
        self.run = run
        self.figures = FiguresAccumulator(run.request.mode, run.num_devices)
        self._started = run.clock()
        self._events: list[Event] = []

    def round(self, done: Round) -> None:
        """Report a round and the tokens whose text is final."""
        answer, outcome, now = self.run.answer, done.outcome, self.since(done.decided)
        before = answer.num_tokens
        released = answer.push(zip(done.committed, self._describe_tokens(done, now), strict=True))
        num_committed = answer.num_tokens - before
        if done.waited > 0:
            self.span("target", "wait", done.started - done.waited, done.started, done.index)
        self.span("target", "verify", done.started, done.decided, done.index)
        self._events.append(self._round_event(done, min(outcome.accepted, num_committed), num_committed))
        self._release(released)
        self.flush()

    def _round_event(self, done: Round, accepted: int, num_committed: int) -> RoundEvent:
        """`accepted` counts committed tokens only: an end inside the block cuts what comes after it."""
        proposal = done.proposal
        return RoundEvent(
            run_id=self.run.run_id,
            index=done.index,
            drafted=len(proposal.token_ids),
            accepted=accepted,
            bonus_token_id=done.outcome.bonus_token_id,
            start=self.since(done.started),
            verify_ms=(done.decided - done.started) * 1e3,
            draft_ms=proposal.draft_seconds * 1e3,
            wait_ms=done.waited * 1e3,
            cache=proposal.cache,
            fallback=proposal.fallback,
            fan_out=proposal.fan_out,
            prepared=tuple(PreparedOutcome(accepted=k, token_ids=ids) for k, ids in proposal.prepared),
            num_committed=num_committed,
            served=proposal.served,
            estimates=proposal.estimates,
        )

    def _describe_tokens(self, done: Round, now: float) -> list[CommittedToken]:
        proposal, committed, accepted = done.proposal, done.committed, done.outcome.accepted
        run, logits = self.run, done.logits[: len(done.committed)]
        shown, likeliest = run.verifier.shown(logits, committed, run.request.num_alternatives)
        return [
            CommittedToken(
                time=now,
                round_index=done.index,
                place=place,
                origin=proposal.origin if place < accepted else done.bonus_origin,
                p=shown[place],
                q=proposal.q[place] if place < min(accepted, len(proposal.q)) else None,
                alternatives=tuple(Alternative(token_id=i, text=run.piece(i), p=p) for i, p in likeliest[place]),
            )
            for place in range(len(committed))
        ]

    def _release(self, released: list[ReleasedToken[CommittedToken]]) -> None:
        for token in released:
            known = token.payload
            self._events.append(
                TokenEvent(
                    run_id=self.run.run_id,
                    index=token.index,
                    token_id=token.token_id,
                    text=token.text,
                    time=known.time,
                    round_index=known.round_index,
                    place=known.place,
                    origin=known.origin,
                    p=known.p,
                    q=known.q,
                    alternatives=known.alternatives,
                )
            )

    def finish(
        self, status: Status, reason: StopReason, error: str | None, spans: tuple[DraftSpan, ...]
    ) -> RunFinished:
        """End the run: release held text, report the draft's last spans, then RunFinished."""
        run, ended = self.run, self.since(self.run.clock())
        self._release(run.answer.finish())
        self.draft_spans(spans)
        self.flush()
        finished = RunFinished(
            run_id=run.run_id,
            status=status,
            stop_reason=reason,
            time=ended,
            text=run.answer.text,
            token_ids=run.answer.token_ids,
            figures=self.figures.figures(ended),
            error=error,
        )
        run.emit([finished])
        return finished

    def since(self, moment: float) -> float:
        """Seconds from the run's start to an absolute moment."""
        return moment - self._started

    def span(self, lane: Lane, kind: SpanKind, start: float, end: float, round_index: int) -> None:
        """Report a stretch of work, given in absolute times."""
        start, end = self.since(start), self.since(end)
        self._events.append(
            SpanEvent(run_id=self.run.run_id, lane=lane, kind=kind, start=start, end=end, round_index=round_index)
        )

    def draft_spans(self, spans: tuple[DraftSpan, ...]) -> None:
        """Report what the draft says it did: its clock is the machine's monotonic one, as ours is."""
        for span in spans:
            self.span("draft", span.kind, span.start, span.end, span.round_index)

    def phase(self, phase: Phase, progress: float | None = None) -> None:
        """Report that a phase began or how far it is."""
        now = self.since(self.run.clock())
        # At the first event of a prefill the target has not looked at the prompt yet.
        num_reused = None if progress == 0.0 else self.run.target.num_reused
        self._events.append(
            PhaseEvent(run_id=self.run.run_id, phase=phase, time=now, progress=progress, num_reused=num_reused)
        )
        self.flush()

    def notice(self, message: str) -> None:
        """Report something that the user should know."""
        self._events.append(Notice(run_id=self.run.run_id, message=message, time=self.since(self.run.clock())))

    def flush(self) -> None:
        """Emit what has gathered, as one delivery."""
        events, self._events = self._events, []
        for event in events:
            self.figures.add(event)
        if events:
            self.run.emit(events)
