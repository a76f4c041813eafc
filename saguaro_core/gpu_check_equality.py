"""Do AR, SD and SSD say the same? A random pair in this process, the default pair in the engine's own processes."""

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from saguaro_core.checks.local import LocalDraft, LocalEngine
from saguaro_core.checks.near_ties import HALF_TIE_BELOW, TIE_BELOW, TieJudge, best_two_gap, first_difference
from saguaro_core.checks.random_models import TINY, make_tiny_pair
from saguaro_core.checks.rows import Problems, Row, Setting, reported_in
from saguaro_core.config import (
    EngineConfig,
    GenerationRequest,
    Message,
    Mode,
    Placement,
    SamplingParams,
    SpeculationConfig,
)
from saguaro_core.engine import Engine
from saguaro_core.errors import ModelError
from saguaro_core.events import Event, RoundEvent, RunFinished, RunStarted
from saguaro_core.models.catalogue import DEFAULT_TARGET
from saguaro_core.models.fetch import fetch_model
from saguaro_core.prompts import select_prompts

_TEMPERATURES = (0.0, 0.8)
_SPECULATIVE: tuple[Mode, ...] = ("sd", "ssd")
_RANDOM = "AR = SD = SSD, random pair"
_DEFAULT = "AR = SD = SSD, default pair"
_RUN_TIMEOUT = 60.0
_LOAD_TIMEOUT = 60.0
# A float16 target leaves its own text now and then where two scores nearly tie; more often than this is a fault.
_MOST_TIES = 1 / 3


@dataclass(slots=True)
class _Tally:
    """How comparisons with AR ended, and what rounds they went through."""

    same: int = 0
    ties: int = 0
    faults: list[str] = field(default_factory=list)
    rounds: Counter[str] = field(default_factory=Counter)
    accepted: int = 0

    def add_rounds(self, rounds: Iterable[RoundEvent]) -> None:
        for event in rounds:
            self.rounds[str(event.cache)] += 1
            self.accepted += event.accepted

    def row(self, check: str, detail: str, most_ties: int) -> Row:
        """The check's row; it fails too if what should be tested did not come up."""
        problems = Problems()
        compared = self.same + self.ties + len(self.faults)
        for fault in self.faults[:3]:
            problems.expect(False, fault)
        problems.expect(self.ties <= most_ties, f"{self.ties} ties are more than {most_ties}")
        problems.expect(min(self.rounds["hit"], self.rounds["miss"], self.accepted) > 0, "hits or misses did not occur")
        seen = (
            f"{self.same} of {compared} answers equal AR's, {self.ties} part at a near-tie, {len(self.faults)} differ; "
            f"{self.rounds['hit']} hits, {self.rounds['miss']} misses, {self.accepted} accepted"
        )
        data = {"same": self.same, "ties": self.ties, "different": len(self.faults)}
        return problems.row(check, f"{seen}; {detail}", data)


def check_equality(setting: Setting) -> list[Row]:
    """A row for the random pair, and one for each placement of the default pair."""
    rows: list[Row] = []
    with reported_in(rows, _RANDOM):
        rows.append(_random_pair(setting))
    if setting.is_tiny:
        return [*rows, Row(_DEFAULT, "skipped", "--tiny leaves the engine's processes out")]
    try:
        fetch_model(DEFAULT_TARGET)
    except ModelError as error:
        return [*rows, Row(_DEFAULT, "skipped", f"the default target is not here: {error}")]
    for target, draft in dict.fromkeys([(setting.first, setting.first), (setting.first, setting.last)]):
        with reported_in(rows, _DEFAULT):
            rows.append(_default_pair(target, draft))
    return rows


def _random_pair(setting: Setting) -> Row:
    """A tiny float32 pair: the fixed shapes and graphs, verified token by token."""
    target, draft = make_tiny_pair((setting.first, setting.last), difference=0.1)
    engine = LocalEngine(target, LocalDraft(draft, setting.last), setting.first)
    tally, count = _Tally(), 1 if setting.is_tiny else 8
    for temperature in (0.0, 1.0):
        for seed in range(count):
            prompt = torch.randint(TINY.vocabulary_size, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
            sampling = SamplingParams(temperature=temperature, seed=seed, max_new_tokens=32)
            speculation = SpeculationConfig(lookahead=2 + seed % 3, budget=4 + 4 * (seed % 3))
            wanted = engine.run("ar", prompt, sampling, speculation).token_ids
            for mode in _SPECULATIVE:
                run = engine.run(mode, prompt, sampling, speculation)
                if mode == "ssd":
                    tally.add_rounds(run.rounds)
                place = first_difference(wanted, run.token_ids)
                where = f"{mode} differs at seed {seed}, temperature {temperature:g}, token {place}"
                if place is None:
                    tally.same += 1
                elif best_two_gap(target, [*prompt, *wanted[:place]], sampling) < TIE_BELOW:
                    tally.ties += 1
                else:
                    tally.faults.append(where)
    return tally.row(_RANDOM, f"float32, {setting.places}", most_ties=1)


@dataclass(slots=True)
class _Answer:
    """One run of the engine, gathered on its client's thread."""

    events: list[Event] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def take(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, RunFinished):
            self.is_over.set()

    def result(self) -> RunFinished:
        """The run's end. Raises ModelError if it failed or took too long."""
        if not self.is_over.wait(_RUN_TIMEOUT):
            raise ModelError(f"a run did not end within {_RUN_TIMEOUT:g} s.")
        finished = self.events[-1]
        assert isinstance(finished, RunFinished)
        if finished.status != "finished":
            raise ModelError(f"a run ended {finished.status}: {finished.error}")
        return finished

    def prompt_ids(self) -> list[int]:
        return [i for event in self.events if isinstance(event, RunStarted) for i in event.prompt_token_ids]

    def rounds(self) -> list[RoundEvent]:
        return [event for event in self.events if isinstance(event, RoundEvent)]


def _default_pair(target: str, draft: str) -> Row:
    """The real pair in its real processes, on two devices or sharing one."""
    is_half = not target.startswith("cpu")
    judge = TieJudge(device=target, bound=HALF_TIE_BELOW if is_half else TIE_BELOW)
    tally = _Tally()
    config = EngineConfig(placement=Placement(target=target, draft=draft), load_timeout=_LOAD_TIMEOUT)
    with Engine(config) as engine:
        info = engine.wait_ready(2 * _LOAD_TIMEOUT)
        if info.draft is None:
            raise ModelError(f"the draft could not be loaded: {info.draft_error}")
        for temperature in _TEMPERATURES:
            for number, prompt in enumerate(select_prompts(4)):
                sampling = SamplingParams(temperature=temperature, seed=100 + number, max_new_tokens=24)
                _compare(engine, prompt.text, sampling, judge, tally)
    compared = tally.same + tally.ties + len(tally.faults)
    places = f"target on {info.target.device}, draft on {info.draft.device}, {info.target.dtype}"
    return tally.row(_DEFAULT, f"a tie is closer than {judge.bound:g}; {places}", int(compared * _MOST_TIES))


def _compare(engine: Engine, text: str, sampling: SamplingParams, judge: TieJudge, tally: _Tally) -> None:
    wanted = _run(engine, text, "ar", sampling)
    for mode in _SPECULATIVE:
        answer = _run(engine, text, mode, sampling)
        if mode == "ssd":
            tally.add_rounds(answer.rounds())
        first, second = wanted.result().token_ids, answer.result().token_ids
        if first == second:
            tally.same += 1
        elif judge.is_tie(answer.prompt_ids(), first, second, sampling):
            tally.ties += 1
        else:
            where = f"token {first_difference(first, second)}, temperature {sampling.temperature:g}"
            tally.faults.append(f"{mode} differs at {where} of {text[:30]!r}")


def _run(engine: Engine, text: str, mode: Mode, sampling: SamplingParams) -> _Answer:
    answer = _Answer()
    request = GenerationRequest(
        messages=(Message(role="user", content=text),),
        mode=mode,
        sampling=sampling,
        speculation=SpeculationConfig(),
        num_alternatives=0,
    )
    engine.submit(f"check-{mode}-{id(answer)}", request, answer.take)
    answer.result()
    return answer
