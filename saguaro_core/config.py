"""Settings: what an engine is started with, and what one request may choose.

Every class is frozen and validates itself, so an object that exists is usable. `from_mapping` reads
untrusted data (a form, a JSON body, a stored run) and refuses unknown names instead of dropping them.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self, get_args

from saguaro_core.errors import InvalidRequest

Mode = Literal["ar", "sd", "ssd"]
VerificationRule = Literal["shared_noise", "rejection"]
FanOutPolicy = Literal["confident", "geometric", "uniform", "list"]
FallbackPolicy = Literal["auto", "neural", "fast"]
CpuWeights = Literal["auto", "int8", "int4", "float16"]
ServicePolicy = Literal["auto", "full", "ready"]
DeepeningPolicy = Literal["likely", "all"]
CopyingPolicy = Literal["ngram", "off"]
Role = Literal["system", "user", "assistant"]

MODES: tuple[Mode, ...] = get_args(Mode)
MAX_LOOKAHEAD = 16
MAX_BUDGET = 64
MAX_STOP_STRINGS = 8
MAX_SEED = 2**63 - 1


def _require(condition: bool, name: str, value: object, remedy: str) -> None:
    """Raise InvalidRequest that names the setting, the value received and what to do."""
    if not condition:
        raise InvalidRequest(f"{name} is {value!r}: {remedy}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require_int(name: str, value: object, low: int, high: int) -> None:
    _require(
        _is_int(value) and low <= value <= high,  # type: ignore[operator]
        name,
        value,
        f"give a whole number from {low} to {high}.",
    )


def _require_number(name: str, value: object, low: float, high: float) -> None:
    _require(
        _is_number(value) and low <= value <= high,  # type: ignore[operator]
        name,
        value,
        f"give a number from {low:g} to {high:g}.",
    )


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    _require(value in choices, name, value, f"choose one of {', '.join(choices)}.")


class _FromMapping:
    """Strict construction from untrusted data, shared by the request classes."""

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Self:
        """Build from a mapping; lists become tuples. Raises InvalidRequest for unknown names."""
        if not isinstance(data, Mapping):
            raise InvalidRequest(f"{cls.__name__} is {data!r}: give an object of named settings.")
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        for name in data:
            _require(name in known, f"setting {name!r}", data[name], f"known settings: {', '.join(known)}.")
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        try:
            return cls(**values)
        except TypeError as error:
            raise InvalidRequest(f"{cls.__name__}: {error}.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(_FromMapping):
    """How the target's distribution is processed and when an answer ends.

    temperature 0 is greedy. top_k 0 and top_p 1 switch the filters off. `stop` strings end the answer
    before their own text.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require_number("temperature", self.temperature, 0.0, 2.0)
        _require_int("top_k", self.top_k, 0, 1_000_000)
        _require_number("top_p", self.top_p, 0.0, 1.0)
        _require(self.top_p > 0.0, "top_p", self.top_p, "give a number above 0, up to 1.")
        _require_int("seed", self.seed, 0, MAX_SEED)
        _require_int("max_new_tokens", self.max_new_tokens, 1, 1_000_000_000)
        _require(
            isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop),
            "stop",
            self.stop,
            "give a list of non-empty strings.",
        )
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", self.stop, f"give at most {MAX_STOP_STRINGS} strings.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig(_FromMapping):
    """Lookahead K, the lossless rule, and the shape of Saguaro's cache.

    `saguaro_c` is C of Definition 14 and acts under rejection sampling at temperature > 0 only.
    `acceptance` and `power_law_r` fix a and r of Theorem 12; None estimates them online.

    `fan_out` `confident` gives the budget to the likeliest outcomes by the draft's confidence in each of its tokens;
    `geometric` is Theorem 12's shape, which it also has where tokens are drawn from the draft.

    `service` says how many tokens SSD's draft serves: `full`, always K; `ready`, K after a miss and after a hit what is
    there; `auto`, as many as are worth their time. `deepening` says which branches of the cache a draft pass makes
    longer: `all`, or those that are `likely` enough to be worth it. Where tokens are drawn from the draft (rejection
    sampling at a temperature above 0) service is full whatever is set: the drawn tokens would depend on times else.

    `copying` mixes the draft's distribution with what followed the same n-gram before (`ngram`), in SD and SSD alike,
    or leaves it as it is (`off`).
    """

    lookahead: int = 4
    rule: VerificationRule = "shared_noise"
    fan_out: FanOutPolicy = "confident"
    budget: int = 12
    fan_out_list: tuple[int, ...] = ()
    acceptance: float | None = None
    power_law_r: float | None = None
    saguaro_c: float = 1.0
    fallback: FallbackPolicy = "auto"
    service: ServicePolicy = "auto"
    deepening: DeepeningPolicy = "likely"
    copying: CopyingPolicy = "ngram"

    def __post_init__(self) -> None:
        _require_int("lookahead", self.lookahead, 1, MAX_LOOKAHEAD)
        _require_choice("rule", self.rule, get_args(VerificationRule))
        _require_choice("fan_out", self.fan_out, get_args(FanOutPolicy))
        _require_int("budget", self.budget, 1, MAX_BUDGET)
        _require_number("saguaro_c", self.saguaro_c, 0.0, 1.0)
        _require_choice("fallback", self.fallback, get_args(FallbackPolicy))
        _require_choice("service", self.service, get_args(ServicePolicy))
        _require_choice("deepening", self.deepening, get_args(DeepeningPolicy))
        _require_choice("copying", self.copying, get_args(CopyingPolicy))
        if self.acceptance is not None:
            _require_number("acceptance", self.acceptance, 0.01, 0.99)
        if self.power_law_r is not None:
            _require_number("power_law_r", self.power_law_r, 0.01, 10.0)
        self._check_fan_out_list()

    def _check_fan_out_list(self) -> None:
        if self.fan_out != "list":
            return
        shape = self.fan_out_list
        _require(
            isinstance(shape, tuple)
            and len(shape) == self.lookahead + 1
            and all(_is_int(f) and f >= 0 for f in shape)
            and 1 <= sum(shape) <= MAX_BUDGET,
            "fan_out_list",
            shape,
            f"give lookahead + 1 = {self.lookahead + 1} counts from 0 up that sum to 1..{MAX_BUDGET}.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Message(_FromMapping):
    """One turn of a chat."""

    role: Role
    content: str

    def __post_init__(self) -> None:
        _require_choice("role", self.role, get_args(Role))
        _require(isinstance(self.content, str), "content", self.content, "give a text.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One answer to make: the chat so far, the mode, and its settings. The last turn is the user's.

    With `reuse_prefix` the run starts from what the caches hold of its prompt; without, it reads the whole prompt, as
    runs must whose first tokens are compared.
    """

    messages: tuple[Message, ...]
    mode: Mode = "ssd"
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    num_alternatives: int = 5
    reuse_prefix: bool = True

    def __post_init__(self) -> None:
        _require_choice("mode", self.mode, MODES)
        _require(isinstance(self.reuse_prefix, bool), "reuse_prefix", self.reuse_prefix, "give true or false.")
        _require_int("num_alternatives", self.num_alternatives, 0, 20)
        _require(bool(self.messages), "messages", self.messages, "give at least one user message.")
        last = self.messages[-1]
        _require(last.role == "user", "the last message's role", last.role, "the last turn must be the user's.")
        if not last.content.strip():
            raise InvalidRequest("The prompt is empty: write something to answer.")

    def settings(self) -> dict[str, Any]:
        """Everything that shapes the answer, as plain JSON data (the prompt is stored beside it)."""
        return {
            "mode": self.mode,
            "num_alternatives": self.num_alternatives,
            "reuse_prefix": self.reuse_prefix,
            "sampling": asdict(self.sampling),
            "speculation": asdict(self.speculation),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the two models run: `auto`, `cpu`, `cpu:0`, `cpu:0-3`, `cuda:0`, `mps`, or `cuda:0+cuda:1` (sharded)."""

    target: str = "auto"
    draft: str = "auto"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `auto` or `target=cuda:0,draft=cuda:1`. Raises InvalidRequest."""
        if text == "auto":
            return cls()
        parts = dict(part.partition("=")[::2] for part in text.split(","))
        _require(
            set(parts) <= {"target", "draft"} and all(parts.values()),
            "placement",
            text,
            "write auto, or target=DEVICE,draft=DEVICE such as target=cpu:0,draft=cpu:1.",
        )
        return cls(**parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine is started with; changing any of it means loading again.

    `max_length` limits prompt + answer in tokens (None: the target's own context). Timeouts in seconds.
    `cpu_weights` are the form of the weights on CPUs: int8 and int4 hold quantised checkpoints in their own codes, a
    byte or half a byte each, and everything else as float16; auto is float16 for the target and int8 for the draft.
    `compile_shapes` puts the fixed shapes that run on GPUs through torch.compile, which makes loading take minutes.
    """

    target: str = "smollm2-135m-instruct"
    draft: str = "smollm2-draft"
    placement: Placement = field(default_factory=Placement)
    max_length: int | None = None
    prefill_chunk: int = 256
    draft_timeout: float = 30.0
    load_timeout: float = 1800.0
    compile_shapes: bool = False
    cpu_weights: CpuWeights = "auto"

    def __post_init__(self) -> None:
        _require(bool(self.target), "target", self.target, "give a catalogue name, a hub id or a folder.")
        _require(bool(self.draft), "draft", self.draft, "give a catalogue name, a hub id or a folder.")
        if self.max_length is not None:
            _require_int("max_length", self.max_length, 2, 1_000_000_000)
        _require_int("prefill_chunk", self.prefill_chunk, 1, 65_536)
        _require_number("draft_timeout", self.draft_timeout, 0.1, 3600.0)
        _require_number("load_timeout", self.load_timeout, 1.0, 86_400.0)
        _require_choice("cpu_weights", self.cpu_weights, get_args(CpuWeights))
        _require(isinstance(self.compile_shapes, bool), "compile_shapes", self.compile_shapes, "give true or false.")
