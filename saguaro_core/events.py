"""What a run emits, in order: RunStarted, then phases, spans, rounds and tokens, then one RunFinished.

Times are seconds on the engine's monotonic clock since the run's start (the moment the engine takes the
run from its queue), unless a name says otherwise. Nothing is measured outside the engine and the draft process.
"""

from dataclasses import dataclass
from typing import Literal, Self

from saguaro_core.run_figures import RunFigures

Origin = Literal["target", "draft", "cache_hit", "fallback", "bonus"]
CacheOutcome = Literal["hit", "miss", "compulsory"]
FallbackKind = Literal["neural", "ngram", "pair", "none"]
Served = Literal["full", "short", "plain"]
Phase = Literal["queued", "prefill", "decode"]
Lane = Literal["target", "draft"]
SpanKind = Literal["prefill", "verify", "build", "step", "fallback", "wait"]
Status = Literal["finished", "stopped", "failed"]
StopReason = Literal["eos", "stop", "length", "user", "error"]
# How the notice begins that tells of it: a run's notices, stored ones too, say so whether its draft helped to the end.
DRAFT_LOST = "The draft was lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One of the target's most probable tokens at a position."""

    token_id: int
    text: str
    p: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """The run left the queue; `started_at` is wall-clock Unix time. `prompt` is the rendered chat template."""

    run_id: str
    started_at: float
    prompt: str
    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEvent:
    """The run entered a phase; `progress` is 0..1 inside the phase where it is known.

    num_reused: how many prompt tokens the target did not have to read, because its cache held them from the run
    before; None where that is not known yet.
    """

    run_id: str
    phase: Phase
    time: float
    progress: float | None = None
    num_reused: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One committed token. `time` is when its round committed it, even if its text was held back.

    `text` is the characters that this token completes: empty while a character or a possible stop string is
    open. `place` is the token's index in its round. p and q are the probabilities that target and draft gave the token
    at the run's temperature (at temperature 1 for a greedy run), before top-k and top-p; None where not computed.
    """

    run_id: str
    index: int
    token_id: int
    text: str
    time: float
    round_index: int
    place: int
    origin: Origin
    p: float | None = None
    q: float | None = None
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedOutcome:
    """The bonus tokens that the speculation cache held for one acceptance length."""

    accepted: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftEstimates:
    """What the draft knows when it serves a round's speculation.

    acceptance_* and power_law_r_*: a and r of Theorem 12 as fitted to the rounds so far, for speculations from the
    cache and for those after a miss. critical_batch_size: b* of Theorem 17 by this run's times, None if there is none
    or it cannot be said. All are None in modes without a cache. num_reused: prompt tokens that the draft did not have
    to read.
    """

    acceptance_hit: float | None = None
    power_law_r_hit: float | None = None
    acceptance_miss: float | None = None
    power_law_r_miss: float | None = None
    critical_batch_size: int | None = None
    num_reused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEvent:
    """One forward pass of the target over 1 + drafted tokens, and what it decided.

    `cache` says how this round's speculation was found; None in modes without a cache. `fallback` is what made it
    after a miss. `fan_out` and `prepared` describe the cache that was looked up. `draft_ms` is what the
    draft spent on this round's speculation, `wait_ms` how long the target waited for it, also for one that never
    came. `served` says whether the speculation held all the tokens that it might, fewer, or none (a plain step); None
    in modes without a cache, as are `estimates` in runs without a draft.
    """

    run_id: str
    index: int
    drafted: int
    accepted: int
    bonus_token_id: int
    start: float
    verify_ms: float
    draft_ms: float
    wait_ms: float
    cache: CacheOutcome | None = None
    fallback: FallbackKind | None = None
    fan_out: tuple[int, ...] = ()
    prepared: tuple[PreparedOutcome, ...] = ()
    num_committed: int = 0
    served: Served | None = None
    estimates: DraftEstimates | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanEvent:
    """A stretch of work on one device, `start` to `end`."""

    run_id: str
    lane: Lane
    kind: SpanKind
    start: float
    end: float
    round_index: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something the user should know about the run that does not end it (the draft was lost, say)."""

    run_id: str
    message: str
    time: float

    @property
    def is_draft_lost(self) -> bool:
        """Whether from here on the answer went on without its draft: its speed is no longer that of its mode."""
        return self.message.startswith(DRAFT_LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished:
    """The run ended, in whatever way; `text` and `token_ids` are the whole answer, also when it was cut."""

    run_id: str
    status: Status
    stop_reason: StopReason
    time: float
    text: str
    token_ids: tuple[int, ...]
    figures: RunFigures
    error: str | None = None

    @classmethod
    def unstarted(cls, run_id: str, error: str | None = None) -> Self:
        """The end of a run that emitted nothing: stopped in the queue, or refused with an error."""
        return cls(
            run_id=run_id,
            status="stopped" if error is None else "failed",
            stop_reason="user" if error is None else "error",
            time=0.0,
            text="",
            token_ids=(),
            figures=RunFigures(),
            error=error,
        )


Event = RunStarted | PhaseEvent | TokenEvent | RoundEvent | SpanEvent | Notice | RunFinished
