"""Hypothesis strategies for the engine's data: small distributions, and every message with valid fields."""

from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import settings
from hypothesis import strategies as st

from saguaro_core import config

# Properties here hold exactly or not at all: the same examples every time, in bounded time.
settings.register_profile("engine", deadline=None, derandomize=True, max_examples=60)
EXACT = settings.get_profile("engine")


def distributions(size: int) -> st.SearchStrategy[list[float]]:
    """Probabilities over `size` tokens, zeros and point masses included."""
    weights = st.lists(st.integers(0, 6), min_size=size, max_size=size).filter(any)
    return weights.map(lambda counts: [count / sum(counts) for count in counts])


def sampling_params() -> st.SearchStrategy[config.SamplingParams]:
    """Valid sampling settings."""
    return st.builds(
        config.SamplingParams,
        temperature=st.floats(0, 2),
        top_k=st.integers(0, 1_000_000),
        top_p=st.floats(0, 1, exclude_min=True),
        seed=st.integers(0, config.MAX_SEED),
        max_new_tokens=st.integers(1, 1_000_000_000),
        stop=st.lists(st.text(min_size=1), max_size=config.MAX_STOP_STRINGS).map(tuple),
    )


@st.composite
def speculation_configs(draw: st.DrawFn) -> config.SpeculationConfig:
    """Valid speculation settings, explicit lists included."""
    lookahead = draw(st.integers(1, config.MAX_LOOKAHEAD))
    shape = draw(st.lists(st.integers(0, 3), min_size=lookahead + 1, max_size=lookahead + 1).filter(any))
    fan_out: config.FanOutPolicy = draw(st.sampled_from(get_args(config.FanOutPolicy)))
    return config.SpeculationConfig(
        lookahead=lookahead,
        rule=draw(st.sampled_from(get_args(config.VerificationRule))),
        fan_out=fan_out,
        budget=draw(st.integers(1, config.MAX_BUDGET)),
        fan_out_list=tuple(shape) if fan_out == "list" else (),
        acceptance=draw(st.none() | st.floats(0.01, 0.99)),
        power_law_r=draw(st.none() | st.floats(0.01, 10)),
        saguaro_c=draw(st.floats(0, 1)),
        fallback=draw(st.sampled_from(get_args(config.FallbackPolicy))),
    )


def generation_requests() -> st.SearchStrategy[config.GenerationRequest]:
    """Valid requests: any chat that ends with a user's turn."""
    turn = st.builds(config.Message, role=st.sampled_from(get_args(config.Role)), content=st.text())
    last = st.builds(
        config.Message, role=st.just("user"), content=st.text(min_size=1).filter(lambda text: bool(text.strip()))
    )
    return st.builds(
        config.GenerationRequest,
        messages=st.tuples(st.lists(turn, max_size=3), last).map(lambda pair: (*pair[0], pair[1])),
        mode=st.sampled_from(config.MODES),
        sampling=sampling_params(),
        speculation=speculation_configs(),
        num_alternatives=st.integers(0, 20),
    )


def engine_configs() -> st.SearchStrategy[config.EngineConfig]:
    """Valid engine settings."""
    return st.builds(
        config.EngineConfig,
        target=st.text(min_size=1),
        draft=st.text(min_size=1),
        placement=st.builds(config.Placement, target=st.text(), draft=st.text()),
        max_length=st.none() | st.integers(2, 1_000_000_000),
        prefill_chunk=st.integers(1, 65_536),
        draft_timeout=st.floats(0.1, 3600),
        load_timeout=st.floats(1, 86_400),
    )


_VALIDATED: dict[Any, st.SearchStrategy[Any]] = {
    config.SamplingParams: sampling_params(),
    config.SpeculationConfig: speculation_configs(),
    config.GenerationRequest: generation_requests(),
    config.EngineConfig: engine_configs(),
}
_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(),
    bytes: st.binary(),
    bool: st.booleans(),
    type(None): st.none(),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type as our messages use them: plain types, tuples, mappings, choices, and dataclasses of these."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind in _VALIDATED:
        return _VALIDATED[kind]
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return st.sampled_from(arguments)
    if get_origin(kind) in (Union, UnionType):
        return st.one_of([values(argument) for argument in arguments])
    if get_origin(kind) is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if get_origin(kind) is tuple:
        return st.tuples(*map(values, arguments))
    if get_origin(kind) is dict:
        return st.dictionaries(*map(values, arguments), max_size=3)
    assert isinstance(kind, type) and is_dataclass(kind), kind
    hints = get_type_hints(kind)
    return st.builds(kind, **{field.name: values(hints[field.name]) for field in fields(kind)})
