"""A draft that is the target itself must be right every time: any other acceptance is a fault in the plumbing.

A greedy answer stays correct even where a cache has a hole, so equality cannot show it; acceptance to the end, the
books of the caches and the hits can.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import pytest
from engine_runs import STORY, EngineRun, greedy, run_to_end
from local_engine import LocalEngine, LocalRun
from watched_runner import WatchedRunner

from saguaro_core.checks.near_ties import TIE_BELOW, TieJudge
from saguaro_core.config import EngineConfig, Message, Mode, SamplingParams, SpeculationConfig
from saguaro_core.engine import Engine
from saguaro_core.events import RoundEvent
from saguaro_core.models.build import TargetModel, build_target
from saguaro_core.models.catalogue import DEFAULT_TARGET
from saguaro_core.models.chat import render_prompt
from saguaro_core.models.placement import DevicePlan

pytestmark = pytest.mark.slow

NUM_TOKENS = 256
LOOKAHEAD = 4
# The sure outcome, and another branch beside it so that branches do not lie where the trunk goes on. A draft as slow as
# its target is worth little: nothing is decided by times here.
SURE = SpeculationConfig(
    lookahead=LOOKAHEAD,
    fan_out="list",
    fan_out_list=(0, 0, 0, 0, 2),
    service="ready",
    deepening="all",
    fallback="neural",
    copying="off",
)


@dataclass
class Twins:
    """Two instances of the default target, a prompt, and AR's answer to it."""

    target: TargetModel
    draft: TargetModel
    prompt: list[int]
    answer: tuple[int, ...] = ()

    @property
    def truth(self) -> list[int]:
        return [*self.prompt, *self.answer]

    def run(self, mode: Mode, speculation: SpeculationConfig = SURE) -> tuple[LocalRun, WatchedRunner, WatchedRunner]:
        target, draft = WatchedRunner(self.target.runner), WatchedRunner(self.draft.runner)
        engine = LocalEngine(target, draft)
        return engine.run(mode, self.prompt, SamplingParams(max_new_tokens=NUM_TOKENS), speculation), target, draft


@pytest.fixture(scope="module")
def twins(default_target_dir: object) -> Twins:
    plan = DevicePlan(("cpu",))
    target, draft = build_target(DEFAULT_TARGET, plan), build_target(DEFAULT_TARGET, plan)
    _, prompt = render_prompt(target.tokenizer, (Message(role="user", content=STORY),))
    pair = Twins(target, draft, list(prompt))
    pair.answer = pair.run("ar")[0].ids
    assert len(pair.answer) == NUM_TOKENS
    return pair


@pytest.fixture(scope="module")
def judge(twins: Twins) -> TieJudge:
    return TieJudge(target=twins.target)


def unexplained(rounds: list[RoundEvent], truth: list[int], num_prompt: int, judge: TieJudge) -> tuple[list[str], int]:
    """Rounds with a rejection away from a tie, and how many rejections were ties."""
    faults, num_ties, length = [], 0, num_prompt
    for event in rounds:
        if event.accepted < min(event.drafted, event.num_committed):
            gap = judge.gap(truth[: length + event.accepted], greedy(1))
            num_ties += gap < TIE_BELOW
            if gap >= TIE_BELOW:
                faults.append(f"round {event.index}: {event.accepted} of {event.drafted}, the best two are {gap} apart")
        length += event.num_committed
    return faults, num_ties


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_every_token_is_accepted_and_the_caches_have_no_hole(twins: Twins, judge: TieJudge, mode: Mode) -> None:
    run, target, draft = twins.run(mode)
    faults, num_ties = unexplained(run.rounds, twins.truth, len(twins.prompt), judge)
    assert not faults
    assert num_ties <= 2
    assert run.ids == twins.answer
    committed = list(accumulate((event.num_committed for event in run.rounds), initial=0))
    # The target reads, in every round, from the last committed token on and nothing else.
    verifications = target.trunk[-len(run.rounds) :]
    last_token = len(twins.prompt) - 1
    assert [first for first, _ in verifications] == [last_token + before for before in committed[:-1]]
    assert [count for _, count in verifications] == [1 + event.drafted for event in run.rounds]
    if num_ties == 0:
        assert {event.drafted for event in run.rounds[:-1]} == {LOOKAHEAD}
        assert not target.gaps
        assert not draft.gaps, "the draft computed slots again that it had"
        for history in [*target.histories, *draft.histories]:
            assert list(history) == twins.truth[: len(history)]
        if mode == "ssd":
            _check_every_round_was_prepared(run, draft, len(twins.prompt))


def _check_every_round_was_prepared(run: LocalRun, draft: WatchedRunner, num_prompt: int) -> None:
    assert [event.cache for event in run.rounds] == ["compulsory"] + ["hit"] * (len(run.rounds) - 1)
    # After a hit the branch's slots are moved, so that only the last drafted token needs a forward.
    extensions = draft.trunk[-(len(run.rounds) - 1) :]
    assert {count for _, count in extensions} == {1}


def test_branches_cut_short_by_the_outcome_are_served_as_they_are(twins: Twins, judge: TieJudge) -> None:
    target, draft = WatchedRunner(twins.target.runner), WatchedRunner(twins.draft.runner)
    engine = LocalEngine(target, draft, passes=lambda number: 1 + number % 4)
    run = engine.run("ssd", twins.prompt, SamplingParams(max_new_tokens=96), SURE)
    faults, num_ties = unexplained(run.rounds, twins.truth, len(twins.prompt), judge)
    assert not faults
    assert run.ids == twins.answer[:96]
    if num_ties == 0:
        # The first build step extends the trunk and plants; each further one is a token of every branch.
        for before, event in pairwise(run.rounds[:-1]):
            ready = before.index % 4
            assert (event.cache, event.drafted) == (("hit", ready) if ready else ("miss", LOOKAHEAD))
        assert not draft.gaps


@pytest.fixture(scope="module")
def self_drafting(default_target_dir: object) -> Iterator[Engine]:
    with Engine(EngineConfig(draft=DEFAULT_TARGET)) as engine:
        engine.wait_ready(300)
        yield engine


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_every_token_is_accepted_between_processes(
    self_drafting: Engine, twins: Twins, judge: TieJudge, mode: Mode
) -> None:
    run = run_to_end(self_drafting, STORY, mode, greedy(NUM_TOKENS), SURE, timeout=240)
    assert run.finished.status == "finished"
    assert run.ids == twins.answer
    faults, num_ties = unexplained(run.rounds, twins.truth, len(twins.prompt), judge)
    assert not faults
    assert num_ties <= 2
    assert run.finished.figures.num_draft_tokens > 0
    if mode == "ssd" and num_ties == 0:
        _check_outcomes_were_among_the_prepared(run)


def _check_outcomes_were_among_the_prepared(run: EngineRun) -> None:
    """Draft and target are equally fast here, so a cache may come too late, but never with the wrong outcome."""
    num_prepared = 0
    for before, event in pairwise(run.rounds):
        prepared = {(entry.accepted, token) for entry in event.prepared for token in entry.token_ids}
        num_prepared += bool(prepared)
        assert not prepared or (before.accepted, before.bonus_token_id) in prepared, event
    assert num_prepared > 0
