"""What goes to a peer's process and what comes back: one JSON object each way, over its standard streams.

The process may be Python or Node, so only plain JSON types are used.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

Option = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to use a peer: what the table says of it, and the peer's own options."""

    name: str
    options: dict[str, Option] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Decode every prompt greedily in each variant, after a warm-up of a few tokens.

    `target` and `draft` are names for the loader, `model_file` a GGUF file. An answer ends with one of `eos_token_ids`
    or after `max_new_tokens`. The process keeps to `cores`, one thread on each.
    """

    peer: str
    variants: tuple[Variant, ...]
    prompts: tuple[tuple[int, ...], ...]
    warm_up: tuple[int, ...]
    warm_up_tokens: int = 8
    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    cores: tuple[int, ...]
    target: str = ""
    draft: str = ""
    model_file: str = ""
    module_folder: str = ""

    @property
    def context_length(self) -> int:
        """Room for every prompt and its answer."""
        longest = max(len(prompt) for prompt in (*self.prompts, self.warm_up))
        return longest + max(self.max_new_tokens, self.warm_up_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer; `times` are seconds from handing over the prompt to having each token."""

    token_ids: tuple[int, ...]
    times: tuple[float, ...]

    @property
    def decode_tokens_per_second(self) -> float | None:
        """The engine's own metric: tokens after the first commit, over the time since it. None where undefined."""
        if not self.times or self.times[-1] <= self.times[0]:
            return None
        return sum(time > self.times[0] for time in self.times) / (self.times[-1] - self.times[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """A variant's answers in the prompts' order, or why there are none; `notes` are facts measured on the way."""

    answers: tuple[Answer, ...] = ()
    error: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a peer's process leaves behind; `peak_memory_bytes` is the most that it held, None where unknown."""

    results: tuple[VariantResult, ...]
    peak_memory_bytes: int | None = None


def pooled_tokens_per_second(answers: Iterable[Answer]) -> float:
    """Tokens per second over several answers together; 0 where undefined."""
    tokens, seconds = 0.0, 0.0
    for answer in answers:
        speed = answer.decode_tokens_per_second
        if speed is not None:
            elapsed = answer.times[-1] - answer.times[0]
            tokens, seconds = tokens + speed * elapsed, seconds + elapsed
    return tokens / seconds if seconds else 0.0


def encode(job: Job) -> bytes:
    """A job as it travels."""
    return msgspec.json.encode(job)


def decode_job(data: bytes) -> Job:
    """Raises msgspec.ValidationError for anything else."""
    return msgspec.json.decode(data, type=Job)


def decode_output(data: bytes) -> Output:
    """Raises msgspec.DecodeError (also for a wrong shape) for anything else."""
    return msgspec.json.decode(data, type=Output)
