"""AR, SD and SSD of the real pair, in their real processes, give the same tokens.

The grid is every prompt with every temperature and K; budget, fan-out and fallback take turns over the prompts.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from engine_runs import EngineRun, start_run

from saguaro_core.checks.near_ties import TieJudge
from saguaro_core.config import FallbackPolicy, Mode, SamplingParams, SpeculationConfig
from saguaro_core.engine import Engine
from saguaro_core.prompts import PROMPTS

pytestmark = pytest.mark.slow

NUM_PROMPTS = 24
NUM_TOKENS = 16
TEMPERATURES = (0.0, 0.8)
LOOKAHEADS = (1, 3, 5)
MOST_TIES = 2

PROMPT_TEXTS = [prompt.text for prompt in PROMPTS[:NUM_PROMPTS]]
_FALLBACKS: tuple[FallbackPolicy, ...] = ("neural", "fast", "auto")


def sampling_of(number: int, temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=100 + number, max_new_tokens=NUM_TOKENS)


def speculation_of(number: int, lookahead: int) -> SpeculationConfig:
    """The settings take turns with periods that have no common factor, so that all combinations come up."""
    fallback = _FALLBACKS[number % 3]
    match number % 4:
        case 0:
            return SpeculationConfig(lookahead=lookahead, fallback=fallback, budget=2)
        case 1:
            return SpeculationConfig(lookahead=lookahead, fallback=fallback, fan_out="uniform", budget=16)
        case 2:
            shape = (0, *range(lookahead, 0, -1))
            return SpeculationConfig(lookahead=lookahead, fallback=fallback, fan_out="list", fan_out_list=shape)
        case _:
            return SpeculationConfig(lookahead=lookahead, fallback=fallback, saguaro_c=0.5)


@dataclass
class Seen:
    """What happened in a set of runs."""

    caches: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    rejections: int = 0
    full_rounds: int = 0
    ties: list[str] = field(default_factory=list)

    def add(self, run: EngineRun) -> None:
        for event in run.rounds:
            self.caches[str(event.cache)] += 1
            self.fallbacks[str(event.fallback)] += 1
            self.rejections += event.accepted < min(event.drafted, event.num_committed)
            self.full_rounds += 0 < event.drafted == event.accepted


@pytest.fixture(scope="module")
def judge() -> TieJudge:
    return TieJudge()


@pytest.fixture(scope="module")
def reference(engine: Engine) -> Callable[[float], list[EngineRun]]:
    """AR's answers to all prompts at a temperature, made once."""
    known: dict[float, list[EngineRun]] = {}

    def answers(temperature: float) -> list[EngineRun]:
        if temperature not in known:
            known[temperature] = [
                start_run(engine, text, "ar", sampling_of(number, temperature))
                for number, text in enumerate(PROMPT_TEXTS)
            ]
        return known[temperature]

    return answers


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_all_modes_give_the_same_tokens(
    engine: Engine,
    reference: Callable[[float], list[EngineRun]],
    judge: TieJudge,
    record_testsuite_property: Callable[[str, object], None],
    temperature: float,
    lookahead: int,
) -> None:
    expected = reference(temperature)
    settings = [speculation_of(number, lookahead) for number in range(NUM_PROMPTS)]
    modes: tuple[Mode, ...] = ("sd", "ssd")
    runs = {
        mode: [
            start_run(engine, text, mode, sampling_of(number, temperature), settings[number])
            for number, text in enumerate(PROMPT_TEXTS)
        ]
        for mode in modes
    }
    seen = Seen()
    for mode, answers in runs.items():
        for number, (wanted, run) in enumerate(zip(expected, answers, strict=True)):
            assert wanted.wait(300).status == run.wait(300).status == "finished"
            assert not run.notices
            assert sum(event.drafted for event in run.rounds) > 0
            if mode == "ssd":
                seen.add(run)
            if run.ids != wanted.ids:
                sampling = sampling_of(number, temperature)
                where = f"{mode}, prompt {number}: {wanted.ids} and {run.ids}"
                assert judge.is_tie(run.prompt_ids, wanted.ids, run.ids, sampling), where
                seen.ties.append(where)
            else:
                assert run.finished.text == wanted.finished.text
    name = f"equality, temperature {temperature}, K {lookahead}"
    record_testsuite_property(name, f"{len(seen.ties)} ties, {dict(seen.caches)}, {dict(seen.fallbacks)}")
    assert len(seen.ties) <= MOST_TIES, seen.ties
    assert seen.caches["compulsory"] == NUM_PROMPTS
    assert min(seen.caches["hit"], seen.caches["miss"], seen.rejections, seen.full_rounds) > 0, seen
    assert min(seen.fallbacks[kind] for kind in ("neural", "ngram", "none")) > 0, seen
