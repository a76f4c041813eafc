"""Runs under way on the real pair: their events, their order, stopping them, and requests that cannot be served."""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from engine_runs import STORY, EngineRun, draft_process, greedy, run_to_end, start_run
from tiny_models import CONTROL_TOKENS, make_tokenizer

from saguaro_core.config import MODES, EngineConfig, Mode, SamplingParams, SpeculationConfig
from saguaro_core.engine import Engine
from saguaro_core.errors import EngineUnavailable, InvalidRequest, ModelError
from saguaro_core.events import PhaseEvent, RunFinished, RunStarted, SpanEvent
from saguaro_core.figures import FiguresAccumulator
from saguaro_core.status import EngineStatus

PROMPT = "Explain step by step how to make a cup of green tea."
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_new_tokens=40)
LONG_PROMPT = "Summarise this. " + "The keeper lit the lamp and the dog slept by the door. " * 250
NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

SaveLlama = Callable[..., Path]


@pytest.fixture(scope="module")
def runs(engine: Engine) -> dict[Mode, EngineRun]:
    """One run of each mode, submitted at once."""
    started = {mode: start_run(engine, PROMPT, mode, SAMPLED, num_alternatives=2) for mode in MODES}
    for run in started.values():
        run.wait()
    return started


def idle_cpu_seconds(process: psutil.Process, seconds: float = 1.0) -> float:
    """How much processor time a process takes while nothing is asked of it."""
    before = sum(process.cpu_times()[:2])
    time.sleep(seconds)
    return float(sum(process.cpu_times()[:2]) - before)


class TestEvents:
    @pytest.mark.parametrize("mode", MODES)
    def test_a_run_starts_once_goes_through_its_phases_and_ends_once(
        self, runs: dict[Mode, EngineRun], mode: Mode
    ) -> None:
        run = runs[mode]
        assert isinstance(run.events[0], RunStarted)
        assert [isinstance(event, RunFinished) for event in run.events].index(True) == len(run.events) - 1
        assert {event.run_id for event in run.events} == {run.run_id}
        phases = [phase for phase, _ in itertools.groupby(event.phase for event in run.phases)]
        assert phases == ["prefill", "decode"]
        assert run.finished.status == "finished"
        assert run.finished.error is None

    @pytest.mark.parametrize("mode", MODES)
    def test_tokens_and_rounds_add_up_to_the_answer(self, runs: dict[Mode, EngineRun], mode: Mode) -> None:
        run = runs[mode]
        assert tuple(token.token_id for token in run.tokens) == run.ids
        assert [token.index for token in run.tokens] == list(range(len(run.ids)))
        assert "".join(token.text for token in run.tokens) == run.finished.text != ""
        assert sum(event.num_committed for event in run.rounds) == len(run.ids)
        assert [event.index for event in run.rounds] == list(range(len(run.rounds)))
        for event in run.rounds:
            ids = [token.token_id for token in run.tokens if token.round_index == event.index]
            assert len(ids) == event.num_committed
            assert event.accepted <= event.drafted
        assert all(len(token.alternatives) == 2 for token in run.tokens)

    @pytest.mark.parametrize("mode", MODES)
    def test_times_never_go_back_and_lie_inside_the_run(self, runs: dict[Mode, EngineRun], mode: Mode) -> None:
        run = runs[mode]
        for times in (
            [token.time for token in run.tokens],
            [event.start for event in run.rounds],
            [event.time for event in run.of(PhaseEvent)],
            [span.start for span in run.spans if span.kind == "verify"],
        ):
            assert times == sorted(times)
            assert 0 <= times[0] <= times[-1] <= run.finished.time
        assert all(0 <= span.start <= span.end <= run.finished.time for span in run.of(SpanEvent))

    @pytest.mark.parametrize("mode", MODES)
    def test_figures_equal_a_recomputation_from_the_events(
        self, engine: Engine, runs: dict[Mode, EngineRun], mode: Mode
    ) -> None:
        run, info = runs[mode], engine.status.info
        assert info is not None
        again = FiguresAccumulator(mode, info.num_devices)
        for event in run.events:
            again.add(event)
        assert run.finished.figures == again.figures(run.finished.time)
        assert run.finished.figures.num_tokens == len(run.ids)

    def test_origins_say_what_made_each_token(self, runs: dict[Mode, EngineRun]) -> None:
        origins = {mode: {token.origin for token in run.tokens} for mode, run in runs.items()}
        assert origins["ar"] == {"target"}
        assert origins["sd"] == {"draft", "bonus"}
        assert origins["ssd"] <= {"cache_hit", "fallback", "bonus"}
        for run in runs.values():
            accepted = sum(token.origin in ("draft", "cache_hit", "fallback") for token in run.tokens)
            assert accepted == run.finished.figures.num_accepted_draft_tokens

    def test_only_ssd_has_a_cache_whose_first_round_is_a_compulsory_miss(self, runs: dict[Mode, EngineRun]) -> None:
        assert {event.cache for mode in ("ar", "sd") for event in runs[mode].rounds} == {None}
        first, *others = runs["ssd"].rounds
        assert first.cache == "compulsory"
        assert {event.cache for event in others} <= {"hit", "miss"}
        figures = runs["ssd"].finished.figures
        assert figures.num_cache_hits + figures.num_cache_misses == len(others)

    def test_all_modes_give_the_same_answer(self, runs: dict[Mode, EngineRun]) -> None:
        assert len({run.ids for run in runs.values()}) == 1

    @pytest.mark.skipif(NUM_CORES < 2, reason="overlap needs two cores")
    def test_the_draft_builds_while_the_target_verifies(self, engine: Engine, runs: dict[Mode, EngineRun]) -> None:
        """Another program may take a core for a while, so the best of three runs counts."""
        measured = [runs["ssd"].finished.figures.build_overlap or 0.0]
        while measured[-1] <= 0.5 and len(measured) < 3:
            measured.append(run_to_end(engine, PROMPT, "ssd", SAMPLED).finished.figures.build_overlap or 0.0)
        assert measured[-1] > 0.5, measured


class TestQueue:
    def test_runs_decode_one_at_a_time_in_the_order_of_submission(self, engine: Engine) -> None:
        modes: tuple[Mode, ...] = ("ssd", "ar", "sd", "ar")
        waiting = [start_run(engine, PROMPT, mode, greedy(8)) for mode in modes]
        for run in waiting:
            assert run.wait().status == "finished"
        for before, after in itertools.pairwise(waiting):
            assert before.arrivals[-1] <= after.arrivals[0]

    def test_a_run_keeps_the_settings_it_was_submitted_with(self, engine: Engine) -> None:
        lengths = (5, 9, 3)
        waiting = [start_run(engine, PROMPT, "sd", greedy(length)) for length in lengths]
        assert tuple(len(run.wait().token_ids) for run in waiting) == lengths


class TestStop:
    @pytest.fixture(autouse=True)
    def _next_run_is_like_in_a_fresh_state(self, engine: Engine) -> Iterator[None]:
        """A run after the stop has the same tokens, and the same rounds where time does not shape them."""
        before = run_to_end(engine, PROMPT, "sd", greedy(10))
        yield
        after = run_to_end(engine, PROMPT, "sd", greedy(10))
        speculative = run_to_end(engine, PROMPT, "ssd", greedy(10))
        assert after.finished.status == speculative.finished.status == "finished"
        assert before.ids == after.ids == speculative.ids
        assert [_shape(run) for run in (before, after)] == [_shape(before)] * 2
        assert not after.notices and not speculative.notices

    @pytest.mark.parametrize("mode", MODES)
    def test_a_running_answer_ends_within_one_round(self, engine: Engine, mode: Mode) -> None:
        run = start_run(engine, STORY, mode, greedy(1024))
        run.wait_for_tokens(12)
        engine.stop(run.run_id)
        seen = len(run.rounds)
        finished = run.wait(10)
        assert (finished.status, finished.stop_reason, finished.error) == ("stopped", "user", None)
        # The round under way, and one whose events were already on their way here.
        assert len(run.rounds) - seen <= 2
        assert 12 <= len(finished.token_ids) < 200
        assert finished.text == "".join(token.text for token in run.tokens) != ""
        reference = run_to_end(engine, STORY, "ar", greedy(len(finished.token_ids)))
        assert reference.ids == finished.token_ids

    def test_a_build_under_way_is_given_up_and_both_processes_go_idle(self, engine: Engine) -> None:
        speculation = SpeculationConfig(lookahead=12, budget=64)
        run = start_run(engine, STORY, "ssd", greedy(1024), speculation)
        run.wait_for_tokens(3)
        engine.stop(run.run_id)
        assert run.wait(10).status == "stopped"
        assert idle_cpu_seconds(draft_process(engine)) < 0.2
        assert idle_cpu_seconds(psutil.Process(engine.process_id())) < 0.2

    @pytest.mark.parametrize("mode", MODES)
    def test_a_long_prompt_is_given_up_in_the_middle(self, engine: Engine, mode: Mode) -> None:
        run = start_run(engine, LONG_PROMPT, mode, greedy(64))
        run.wait_until(lambda: any((phase.progress or 0) > 0 for phase in run.phases))
        engine.stop(run.run_id)
        finished = run.wait(10)
        assert (finished.status, finished.text, finished.token_ids) == ("stopped", "", ())
        assert not run.rounds
        assert finished.figures.decode_tokens_per_second is None

    def test_a_waiting_run_leaves_the_queue_and_the_others_stay(self, engine: Engine) -> None:
        first = start_run(engine, STORY, "ar", greedy(1024))
        dropped = start_run(engine, STORY, "ssd", greedy(1024))
        last = start_run(engine, PROMPT, "ar", greedy(4))
        first.wait_for_tokens(3)
        engine.stop(dropped.run_id)
        assert dropped.wait(10).status == "stopped"
        assert len(dropped.events) == 1
        assert not first.is_over
        engine.stop(first.run_id)
        assert first.wait(10).status == "stopped"
        assert last.wait().status == "finished"

    def test_stopping_what_is_over_or_unknown_changes_nothing(self, engine: Engine) -> None:
        run = run_to_end(engine, PROMPT, "ar", greedy(2))
        engine.stop(run.run_id)
        engine.stop("nobody")
        assert run_to_end(engine, PROMPT, "ar", greedy(2)).ids == run.ids


def _shape(run: EngineRun) -> list[tuple[int, int, int]]:
    return [(event.drafted, event.accepted, event.bonus_token_id) for event in run.rounds]


class TestRefusals:
    def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(self, engine: Engine) -> None:
        run = run_to_end(engine, "word " * 9000, "ssd", greedy(4))
        finished = run.finished
        assert (finished.status, finished.stop_reason, finished.token_ids) == ("failed", "error", ())
        assert len(run.events) == 1
        assert finished.error is not None
        assert "8192" in finished.error
        assert "9" in finished.error
        assert "Shorten the prompt" in finished.error
        assert run_to_end(engine, PROMPT, "ar", greedy(2)).finished.status == "finished"

    def test_a_smaller_context_and_no_draft(self, default_target_dir: Path, tmp_path: Path) -> None:
        config = EngineConfig(draft=str(tmp_path / "missing"), max_length=64)
        with Engine(config) as small:
            info = small.wait_ready(300)
            assert info.context_length == 64
            assert info.draft is None
            assert info.draft_error is not None
            assert "There is no folder" in info.draft_error
            too_long = run_to_end(small, "word " * 80, "ar", greedy(4)).finished
            assert too_long.status == "failed"
            assert "the context of 64 tokens cannot hold it. Shorten the prompt" in (too_long.error or "")
            for mode in ("sd", "ssd"):
                run = run_to_end(small, "Hello", mode, greedy(4))
                assert run.finished.status == "failed"
                assert run.finished.error == info.draft_error
                assert len(run.events) == 1
            fits = run_to_end(small, "Hello", "ar", greedy(1_000)).finished
            assert (fits.status, len(fits.token_ids) <= 64) == ("finished", True)

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            ("corrupt", "could not be read"),
            ("mismatched", "do not pair: token id 0"),
            ("empty", "config.json is missing"),
        ],
    )
    def test_without_a_usable_draft_only_ar_runs(
        self, tiny_llama: SaveLlama, tmp_path: Path, damage: str, message: str
    ) -> None:
        target = tiny_llama("target", eos_token_id=None)
        draft = tmp_path / "draft"
        draft.mkdir()
        if damage == "corrupt":
            weights = tiny_llama("draft") / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-500])
        elif damage == "mismatched":
            tiny_llama("draft", tokenizer=make_tokenizer(control_tokens=CONTROL_TOKENS[::-1]))
        with Engine(EngineConfig(target=str(target), draft=str(draft))) as engine:
            info = engine.wait_ready(120)
            assert info.draft is None
            assert message in (info.draft_error or "")
            for mode in ("sd", "ssd"):
                run = run_to_end(engine, "Hello", mode, greedy(4))
                assert (run.finished.status, run.finished.error) == ("failed", info.draft_error)
                assert len(run.events) == 1
            run = run_to_end(engine, "Hello", "ar", greedy(4))
            assert run.finished.status == "finished"
            assert run.finished.figures.draft_acceptance_rate is None

    def test_an_unknown_target_fails_with_its_reason_and_closes(self, tmp_path: Path) -> None:
        seen: list[EngineStatus] = []
        engine = Engine(EngineConfig(target=str(tmp_path / "nowhere")), on_status=seen.append)
        with pytest.raises(EngineUnavailable, match="the engine is starting"):
            start_run(engine, PROMPT, "ar")
        with engine:
            with pytest.raises(ModelError, match=r"There is no folder .*nowhere"):
                engine.wait_ready(120)
            with pytest.raises(EngineUnavailable, match="the engine is failed"):
                start_run(engine, PROMPT, "ar")
        assert "failed" in {status.state for status in seen}
        assert engine.process_id() is None

    def test_waiting_has_an_end(self, tmp_path: Path) -> None:
        engine = Engine(EngineConfig(target=str(tmp_path)))
        with engine, pytest.raises(EngineUnavailable, match=r"not ready after 0.01 s"):
            engine.wait_ready(0.01)


def test_half_a_character_is_refused_before_anything_is_sent(engine: Engine) -> None:
    """It can come in over JSON; no tokenizer can read it and no link can carry it."""
    with pytest.raises(InvalidRequest, match=r"'\\ud83d' at position 7, which is half a character: remove it"):
        start_run(engine, "broken \ud83d", "ar")
    with pytest.raises(InvalidRequest, match="half a character"):
        start_run(engine, PROMPT, "ar", SamplingParams(stop=("\udc00",)))
    assert run_to_end(engine, PROMPT, "ar", greedy(1)).finished.status == "finished"
