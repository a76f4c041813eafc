"""Every message between engine and draft process, and between the app and the engine, as typed dataclasses.

Each message travels as two frames: its class name and its fields in MessagePack. Draft messages carry the request's
epoch, so that a late answer to an old request can never be used by a new one.
"""

from dataclasses import dataclass
from typing import get_args

import msgspec

from saguaro_core.config import CpuWeights, EngineConfig, GenerationRequest, Mode, SamplingParams, SpeculationConfig
from saguaro_core.events import (
    CacheOutcome,
    DraftEstimates,
    FallbackKind,
    Notice,
    PhaseEvent,
    RoundEvent,
    RunFinished,
    RunStarted,
    Served,
    SpanEvent,
    SpanKind,
    TokenEvent,
)
from saguaro_core.status import EngineStatus, ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadDraft:
    """Engine to draft: load this model for that target; `cores` are the draft's own when its device is the CPU."""

    draft: str
    target: str
    device: str
    cores: tuple[int, ...] = ()
    compile_shapes: bool = False
    cpu_weights: CpuWeights = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLoaded:
    """Draft to engine: ready; `token_ids` maps a trimmed head's columns to target ids (empty: identity)."""

    info: ModelInfo
    token_ids: tuple[int, ...] = ()
    num_columns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFailed:
    """Draft to engine: loading failed, or the request of `epoch` did; the process itself goes on."""

    message: str
    epoch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Engine to draft: a new request. It answers with the first speculation, for round 0.

    Without `reuse_prefix` it reads the whole prompt, whatever its cache holds.
    """

    epoch: int
    mode: Mode
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    speculation: SpeculationConfig
    eos_token_ids: tuple[int, ...]
    lookahead: int
    prefill_chunk: int = 256
    reuse_prefix: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Engine to draft: the outcome of a round; `lookahead` is the most that the next speculation may hold.

    verify_seconds: what the target spent between taking the speculation and this outcome; 0 where it is unknown.
    """

    epoch: int
    round_index: int
    accepted: int
    bonus_token_id: int
    lookahead: int
    verify_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Engine to draft: forget the request. Answered by Ended."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpan:
    """A stretch of the draft's work, in absolute seconds of the machine's monotonic clock."""

    kind: SpanKind
    start: float
    end: float
    round_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Draft to engine: the tokens to verify in `round_index`, and how they were found.

    q holds the draft's probability of each token that is its own: the first ones, which guesses may follow.
    `distributions` are float32 [len(token_ids), num_columns], row-major, for rejection sampling of drawn tokens, else
    empty. `prepared` are the cache's outcomes as (k, bonus tokens). `exhausted` says that the draft's context is full
    and no speculation will come any more.
    """

    epoch: int
    round_index: int
    token_ids: tuple[int, ...]
    q: tuple[float, ...] = ()
    distributions: bytes = b""
    cache: CacheOutcome | None = None
    fallback: FallbackKind | None = None
    fan_out: tuple[int, ...] = ()
    prepared: tuple[tuple[int, tuple[int, ...]], ...] = ()
    draft_seconds: float = 0.0
    spans: tuple[DraftSpan, ...] = ()
    exhausted: bool = False
    served: Served | None = None
    estimates: DraftEstimates | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Draft to engine: idle again; the spans that no speculation carried."""

    epoch: int
    spans: tuple[DraftSpan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTurn:
    """Engine to draft: what is to be told about the sequences of a batch at one moment, each under its own epoch.

    `begins` starts a batch; the cache rows of the one before are then free. Ends are not answered.
    """

    begins: tuple[Begin, ...] = ()
    verified: tuple[Verified, ...] = ()
    ends: tuple[End, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAnswer:
    """Draft to engine: one speculation or failure for each sequence that a turn began or verified."""

    speculations: tuple[Speculation, ...] = ()
    failures: tuple[DraftFailed, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Configure:
    """App to engine, first message: load this pair."""

    config: EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """App to engine: queue a run."""

    run_id: str
    request: GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitBatch:
    """App to engine: queue runs that are decoded together."""

    runs: tuple[Submit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """App to engine: end a queued or running run."""

    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Either link: end the process."""


Message = (
    LoadDraft
    | DraftLoaded
    | DraftFailed
    | Begin
    | Verified
    | End
    | Speculation
    | Ended
    | BatchTurn
    | BatchAnswer
    | Configure
    | Submit
    | SubmitBatch
    | Stop
    | Shutdown
    | EngineStatus
    | RunStarted
    | PhaseEvent
    | TokenEvent
    | RoundEvent
    | SpanEvent
    | Notice
    | RunFinished
)


_DECODERS = {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in get_args(Message)}
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message) -> tuple[bytes, bytes]:
    """The two frames of a message: its class name and its fields."""
    return type(message).__name__.encode(), _ENCODER.encode(message)


def decode(name: bytes, body: bytes) -> Message:
    """The message in two frames. Raises ValueError for an unknown name or fields that do not fit it."""
    decoder = _DECODERS.get(name.decode(errors="replace"))
    if decoder is None:
        raise ValueError(f"message kind {name!r} is unknown: both ends must run the same version.")
    message: Message = decoder.decode(body)
    return message
