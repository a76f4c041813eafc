"""A chat's next turn starts from what the caches hold: warm runs say what cold ones say, and records stay true."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from engine_runs import EngineRun
from local_engine import LocalEngine, LocalRun
from random_models import make_model, make_runner, tokens
from scripted import ScriptedRunner, hashed, mixed
from watched_runner import WatchedRunner

from saguaro_core.config import GenerationRequest, Message, Mode, SamplingParams, SpeculationConfig
from saguaro_core.engine import Engine
from saguaro_core.errors import ModelError
from saguaro_core.models.runner import ForwardBatch
from saguaro_core.trunk import Trunk

V = 24
TARGET = hashed(V, 2.0, salt=1)
DRAFT = mixed(TARGET, hashed(V, 2.0, salt=2), 0.3)
MODES: tuple[Mode, ...] = ("ar", "sd", "ssd", "ssd", "ar", "sd", "ssd")


def transformers_pair(is_warm: bool) -> LocalEngine:
    target, draft = make_runner(make_model()), make_runner(make_model(num_hidden_layers=1))
    return LocalEngine(target, draft, is_warm=is_warm, num_alternatives=0)


def sampling(temperature: float, turn: int, count: int = 10) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=turn, max_new_tokens=count)


def chat(engine: LocalEngine, temperature: float, **speculation: Any) -> list[LocalRun]:
    """Seven turns in changing modes: each prompt is all that was said, something else at its end, and a question.

    At turn 4 the chat goes back to its beginning, so that the caches hold more than is shared.
    """
    text, runs = tokens(9), []
    for turn, mode in enumerate(MODES):
        text = (text[:20] if turn == 4 else text) + tokens(3 + turn, seed=turn)
        run = engine.run(mode, text, sampling(temperature, turn), SpeculationConfig(**speculation))
        assert run.finished.status == "finished", run.finished.error
        runs.append(run)
        text = text + list(run.ids)[: len(run.ids) - turn % 2]
    return runs


class TestWarmEqualsCold:
    @pytest.mark.parametrize(
        ("temperature", "rule"), [(0.0, "shared_noise"), (0.8, "shared_noise"), (0.8, "rejection")]
    )
    def test_token_for_token_over_a_chat(self, temperature: float, rule: Any) -> None:
        warm = chat(transformers_pair(is_warm=True), temperature, rule=rule)
        cold = chat(transformers_pair(is_warm=False), temperature, rule=rule)
        assert [run.ids for run in warm] == [run.ids for run in cold]
        assert {run.finished.figures.num_reused_prompt_tokens for run in cold} == {0}
        reused = [run.finished.figures.num_reused_prompt_tokens or 0 for run in warm]
        assert reused[0] == 0
        prompts = [len(run.loop.run_context.prompt) for run in warm]
        for turn in range(1, len(warm)):
            # All but the new question, and what the turn before left out or changed at the end.
            wanted = 20 if turn == 4 else prompts[turn] - (3 + turn)
            assert wanted - 1 <= reused[turn] <= wanted, turn
        in_draft = [run.finished.figures.num_reused_draft_tokens for run in warm]
        assert in_draft[0] is None
        assert in_draft[1] == 0
        # Turn 2 continues turn 1; what the draft read of AR's answers it reads when it is needed.
        assert all(count is not None and count > 0 for count in in_draft[2:4])

    def test_the_caches_hold_what_their_records_say(self) -> None:
        """WatchedRunner refuses a hole in what any query sees, and names the tokens that each saw."""
        target, draft = WatchedRunner(ScriptedRunner(TARGET, V)), WatchedRunner(ScriptedRunner(DRAFT, V))
        engine, text = LocalEngine(target, draft, is_warm=True, num_alternatives=0), [3, 1, 4, 1, 5]
        for turn, mode in enumerate(MODES):
            target.histories.clear()
            run = engine.run(mode, text, sampling(0.8, turn))
            assert engine.session is not None
            said = [*text, *run.ids]
            for history in target.histories:
                assert list(history[: len(text)]) == said[: len(history)][: len(text)]
            check_record(engine.session.trunk, target)
            if engine.kept is not None:
                check_record(engine.kept.trunk, draft)
            text = [*said, 7, turn]


def check_record(trunk: Trunk, runner: WatchedRunner) -> None:
    assert [runner.slots[slot] for slot in range(len(trunk))] == list(enumerate(trunk.token_ids))


class FailingRunner(ScriptedRunner):
    """Fails in the middle of a forward, after it has written to its slots."""

    fails_at = 0

    def forward(self, batch: ForwardBatch) -> Any:
        logits = super().forward(batch)
        if self.num_forwards == self.fails_at:
            raise ModelError("no more")
        return logits


class TestCutRuns:
    @pytest.mark.parametrize("fails_at", [2, 4, 9])
    @pytest.mark.parametrize("who", ["target", "draft"])
    @pytest.mark.parametrize("mode", ["sd", "ssd"])
    def test_after_a_failure_the_next_run_is_right(self, mode: Mode, who: str, fails_at: int) -> None:
        target, draft = FailingRunner(TARGET, V), FailingRunner(DRAFT, V)
        engine = LocalEngine(target, draft, is_warm=True)
        failing = target if who == "target" else draft
        failing.fails_at = fails_at
        prompt = [3, 1, 4, 1, 5, 9]
        failed = engine.run(mode, prompt, sampling(0.0, 0, 40))
        assert failed.finished.status == "failed"
        again = engine.run(mode, [*prompt, *failed.ids, 2], sampling(0.0, 0, 40))
        cold = LocalEngine(ScriptedRunner(TARGET, V)).run("ar", [*prompt, *failed.ids, 2], sampling(0.0, 0, 40))
        assert again.ids == cold.ids
        assert self.records_are_true(engine)

    @pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
    def test_after_a_stop_the_next_run_is_right_and_warm(self, mode: Mode) -> None:
        engine = LocalEngine(ScriptedRunner(TARGET, V), ScriptedRunner(DRAFT, V), is_warm=True)
        for rounds in range(1, 5):
            countdown = iter([False] * (rounds + 2))
            stopped = engine.run(
                mode, [3, 1, 4, 1, 5], sampling(0.0, 0, 40), should_stop=partial(next, countdown, True)
            )
            assert stopped.finished.status == "stopped"
            prompt = [3, 1, 4, 1, 5, *stopped.ids, 7]
            again = engine.run(mode, prompt, sampling(0.0, 0, 20))
            assert again.ids == LocalEngine(ScriptedRunner(TARGET, V)).run("ar", prompt, sampling(0.0, 0, 20)).ids
            assert (again.finished.figures.num_reused_prompt_tokens or 0) >= len(prompt) - 2
            assert self.records_are_true(engine)

    def records_are_true(self, engine: LocalEngine) -> bool:
        for runner, keeper in ((engine.target, engine.session), (engine.draft, engine.kept)):
            trunk = None if keeper is None else keeper.trunk
            assert isinstance(runner, ScriptedRunner)
            if trunk is not None:
                held = [runner.slots[0, slot] for slot in range(len(trunk))]
                assert held == list(enumerate(trunk.token_ids))
        return True


class TestTrunk:
    def test_keeps_the_common_prefix_and_leaves_the_last_token_to_be_read(self) -> None:
        cases: Sequence[tuple[list[int], list[int], int]] = (
            ([1, 2, 3], [1, 2, 3, 4], 3),
            ([1, 2, 3], [1, 2, 3], 2),
            ([1, 2, 3], [1, 2], 1),
            ([1, 2, 3], [1, 9, 3, 4], 1),
            ([1, 2, 3], [9], 0),
            ([], [1, 2], 0),
        )
        for held, text, shared in cases:
            trunk = Trunk(ScriptedRunner(TARGET, V))
            trunk.append(list(held))
            assert trunk.reuse(text) == shared == len(trunk)
            assert trunk.token_ids == text[:shared]
            trunk.forget()
            assert trunk.reuse(text) == 0

    def test_a_forward_that_fails_is_not_recorded(self) -> None:
        runner = FailingRunner(TARGET, V)
        trunk, runner.fails_at = Trunk(runner), 2
        trunk.forward([1, 2], 0)
        with pytest.raises(ModelError):
            trunk.forward([3], 1)
        assert trunk.token_ids == [1, 2]


def turns(engine: Engine, mode: Mode, temperature: float, texts: Sequence[str]) -> list[EngineRun]:
    """A chat with a real engine; every turn holds all the turns before."""
    messages: list[Message] = []
    runs = []
    for number, text in enumerate(texts):
        messages.append(Message(role="user", content=text))
        run = EngineRun(f"chat-{mode}-{temperature}-{number}-{len(texts)}")
        request = GenerationRequest(
            messages=tuple(messages), mode=mode, sampling=sampling(temperature, 0, 16), num_alternatives=0
        )
        engine.submit(run.run_id, request, run.take)
        run.wait()
        messages.append(Message(role="assistant", content=run.finished.text))
        runs.append(run)
    return runs


@pytest.mark.slow
def test_the_real_pair_reads_only_what_is_new(engine: Engine) -> None:
    question, other = "Name three fruits.", "Which of them is red?"
    first, second = turns(engine, "ssd", 0.0, [question, other])
    request = GenerationRequest(
        messages=(
            Message(role="user", content=question),
            Message(role="assistant", content=first.finished.text),
            Message(role="user", content=other),
        ),
        sampling=sampling(0.0, 0, 16),
        num_alternatives=0,
        reuse_prefix=False,
    )
    cold = EngineRun("chat-cold")
    engine.submit(cold.run_id, request, cold.take)
    cold.wait()
    assert second.prompt_ids == cold.prompt_ids
    assert second.ids == cold.ids
    warm, anew = second.finished.figures, cold.finished.figures
    assert (warm.num_reused_prompt_tokens or 0) >= len(first.prompt_ids) + len(first.ids) - 2
    assert (warm.num_reused_draft_tokens or 0) >= len(first.prompt_ids)
    assert (anew.num_reused_prompt_tokens, anew.num_reused_draft_tokens) == (0, 0)
