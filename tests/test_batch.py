"""Batches: every row says what it says alone, ends on its own, and loses nothing by what happens to another."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from batch_runs import Ask, BatchEngine, ragged
from decoding_runs import check_consistent
from local_engine import LocalRun
from scripted import ScriptedRunner, Table, hashed, mixed
from served_draft import ServedEngine

from saguaro_core.batch_request import MAX_BATCH
from saguaro_core.config import Mode, SamplingParams, SpeculationConfig
from saguaro_core.draft.messages import Begin, Speculation
from saguaro_core.draft.speculator import Speculator
from saguaro_core.errors import DraftUnavailable, ModelError
from saguaro_core.events import Event, Notice, TokenEvent
from saguaro_core.models.steps import Steps

V = 24
TARGET = hashed(V, 2.0, salt=1)
PARTLY = mixed(TARGET, hashed(V, 2.0, salt=2), 0.35)
MODES: tuple[Mode, ...] = ("ar", "sd", "ssd")
# What rounds hold must not depend on how long the machine takes.
STEADY = SpeculationConfig(lookahead=4, budget=8, service="full", deepening="all", fallback="neural", copying="off")


def batch_engine(draft: Table = PARTLY, **options: Any) -> BatchEngine:
    return BatchEngine(ScriptedRunner(TARGET, V), ScriptedRunner(draft, V), **options)


def alone(mode: Mode, ask: Ask, config: SpeculationConfig = STEADY, **options: Any) -> LocalRun:
    subject = ServedEngine(ScriptedRunner(TARGET, V), ScriptedRunner(PARTLY, V), **options)
    return subject.run(mode, ask.prompt, ask.sampling, config)


@cache
def solo_runs(mode: Mode, temperature: float, rule: Any) -> list[LocalRun]:
    return [alone(mode, ask, replace(STEADY, rule=rule)) for ask in ragged(MAX_BATCH, V, temperature=temperature)]


def check_rows(runs: Sequence[LocalRun], solo: Sequence[LocalRun]) -> None:
    for run, own in zip(runs, solo, strict=True):
        assert run.finished.error is None
        assert run.ids == own.ids
        assert (run.finished.status, run.finished.stop_reason) == (own.finished.status, own.finished.stop_reason)
        assert run.finished.text == own.finished.text
        check_consistent(run)


def facts(run: LocalRun) -> list[tuple[object, ...]]:
    return [(e.drafted, e.accepted, e.cache, e.fallback, e.fan_out, e.prepared) for e in run.rounds]


def notices(run: LocalRun) -> list[str]:
    return [event.message for event in run.events if isinstance(event, Notice)]


class TestRowsAreTheirSoloRuns:
    @pytest.mark.parametrize(
        ("mode", "temperature", "rule"),
        [
            *((mode, temperature, "shared_noise") for mode in MODES for temperature in (0.0, 0.8)),
            ("sd", 0.8, "rejection"),
            ("ssd", 0.8, "rejection"),
        ],
    )
    def test_in_every_mode(self, mode: Mode, temperature: float, rule: Any) -> None:
        solo = solo_runs(mode, temperature, rule)
        for count in (1, 2, 5, 16):
            runs = batch_engine().run(mode, ragged(count, V, temperature=temperature), replace(STEADY, rule=rule))
            check_rows(runs, solo[:count])
            assert [facts(run) for run in runs] == [facts(run) for run in solo[:count]]
        if mode == "ssd":
            assert {event.cache for run in runs for event in run.rounds} == {"compulsory", "hit", "miss"}

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    @pytest.mark.parametrize("fallback", ["fast", "auto"])
    def test_with_every_fallback_and_lengths_by_value(self, fallback: Any, temperature: float) -> None:
        asks = ragged(5, V, temperature=temperature)
        runs = batch_engine().run("ssd", asks, SpeculationConfig(lookahead=4, budget=8, fallback=fallback))
        check_rows(runs, solo_runs("ar", temperature, "shared_noise")[:5])

    def test_backups_are_chosen_for_sequences_that_wait_for_each_other(self) -> None:
        made = list[Speculator]()

        def make(runner: Any) -> Speculator:
            made.append(Speculator(runner))
            return made[-1]

        batch_engine(make_speculator=make).run("ssd", ragged(3, V), STEADY)
        assert [(own.chooser.batch_size, own.times.batch_size) for own in made] == [(3, 3)] * 3
        assert all(own.times.waiting > 1 for own in made)

    def test_sequences_share_their_forwards(self) -> None:
        asks = [replace(ask, sampling=SamplingParams(max_new_tokens=20)) for ask in ragged(8, V)]
        for mode in MODES:
            together = batch_engine()
            together.run(mode, asks, STEADY)
            longest = batch_engine()
            longest.run(mode, asks[:1], STEADY)
            for many, one in ((together.target, longest.target), (together.draft, longest.draft)):
                assert isinstance(many, ScriptedRunner)
                assert isinstance(one, ScriptedRunner)
                # Rounds go on until the unluckiest sequence has its tokens, and prompts are read one by one.
                assert many.num_forwards < 2.5 * one.num_forwards + 8

    def test_a_batch_leaves_no_rows_behind(self) -> None:
        subject = batch_engine()
        subject.run("ssd", ragged(3, V), STEADY)
        for runner in (subject.target, subject.draft):
            assert isinstance(runner, ScriptedRunner)
            assert not runner.slots


class TestRaggedRounds:
    def test_one_accepts_nothing_and_one_everything_and_ends_30_tokens_earlier(self) -> None:
        """The draft knows the target's table after even first tokens, and says the opposite after odd ones."""

        def draft(history: tuple[int, ...]) -> list[float]:
            sign = 1 if history[0] % 2 == 0 else -1
            return [sign * score for score in TARGET(history)]

        asks = [
            Ask([1, 7, 3, 9, 2, 2], SamplingParams(max_new_tokens=40)),
            Ask([2, 5], SamplingParams(max_new_tokens=10)),
        ]
        for mode in ("sd", "ssd"):
            none, all_of_them = batch_engine(draft).run(mode, asks, STEADY)
            check_rows([none, all_of_them], [alone("ar", ask) for ask in asks])
            assert {event.accepted for event in none.rounds} == {0}
            assert all(event.accepted == event.drafted for event in all_of_them.rounds)

    def test_a_hit_beside_a_miss_is_each_ones_own(self) -> None:
        runs = batch_engine().run("ssd", ragged(2, V), STEADY)
        together = list(zip(runs[0].rounds, runs[1].rounds, strict=False))
        assert any({a.cache, b.cache} == {"hit", "miss"} for a, b in together)
        for event in (event for pair in together for event in pair):
            assert (event.fallback is None) == (event.cache == "hit")


class TestEnds:
    @pytest.mark.parametrize("mode", MODES)
    def test_each_ends_for_its_own_reason(self, mode: Mode) -> None:
        asks = ragged(4, V)
        said = solo_runs("ar", 0.0, "shared_noise")
        eos = frozenset({said[0].ids[6]})
        asks[1] = replace(asks[1], sampling=replace(asks[1].sampling, stop=(said[1].finished.text[3:6],)))
        asks[3] = replace(asks[3], sampling=replace(asks[3].sampling, max_new_tokens=2))
        runs = batch_engine(eos=eos).run(mode, asks, STEADY)
        check_rows(runs, [alone(mode, ask, eos=eos) for ask in asks])
        assert {run.finished.stop_reason for run in runs} == {"eos", "stop", "length"}

    @pytest.mark.parametrize("mode", MODES)
    def test_a_stop_takes_one_out_within_a_round(self, mode: Mode) -> None:
        asks, seen = ragged(3, V), list[Event]()
        asks[1] = replace(asks[1], on_events=seen.extend, should_stop=lambda: num_tokens(seen) >= 5)
        runs = batch_engine().run(mode, asks, STEADY)
        solo = solo_runs(mode, 0.0, "shared_noise")
        check_rows([runs[0], runs[2]], [solo[0], solo[2]])
        assert (runs[1].finished.status, runs[1].finished.stop_reason) == ("stopped", "user")
        assert 5 <= len(runs[1].ids) <= 5 + STEADY.lookahead
        assert runs[1].ids == solo[1].ids[: len(runs[1].ids)]
        check_consistent(runs[1])

    def test_all_may_be_stopped_before_they_begin(self) -> None:
        asks = [replace(ask, should_stop=lambda: True) for ask in ragged(3, V)]
        runs = batch_engine().run("ssd", asks, STEADY)
        assert [run.finished.status for run in runs] == ["stopped"] * 3
        assert [run.ids for run in runs] == [()] * 3

    def test_a_stop_is_seen_while_the_draft_hangs(self) -> None:
        asks = ragged(3, V)
        asks[1] = replace(asks[1], should_stop=lambda: True)
        ticks = iter(range(10_000))
        runs = batch_engine(deaf_from=1, clock=lambda: next(ticks) / 100).run("ssd", asks, STEADY)
        assert runs[1].finished.status == "stopped"
        assert runs[1].finished.time < runs[0].finished.time
        assert [runs[0].ids, runs[2].ids] == [solo_runs("ar", 0.0, "shared_noise")[row].ids for row in (0, 2)]

    def test_all_may_be_stopped_while_the_draft_hangs(self, caplog: pytest.LogCaptureFixture) -> None:
        sent = list[int]()
        asks = [replace(ask, should_stop=lambda: 3 in sent) for ask in ragged(3, V)]
        subject = batch_engine(deaf_from=3, on_sent=lambda number, message: sent.append(number))
        runs = subject.run("ssd", asks, STEADY)
        assert [run.finished.status for run in runs] == ["stopped"] * 3
        assert all(run.ids for run in runs)
        assert not caplog.records


def num_tokens(events: list[Event]) -> int:
    return sum(isinstance(event, TokenEvent) for event in events)


class TestFailures:
    @pytest.mark.parametrize("mode", MODES)
    def test_a_listener_that_fails_costs_its_own_row_only(self, mode: Mode) -> None:
        asks, seen = ragged(3, V), list[Event]()

        def break_down(events: list[Event]) -> None:
            seen.extend(events)
            if num_tokens(seen) >= 4:
                raise OSError("nobody listens")

        asks[1] = replace(asks[1], on_events=break_down)
        runs, solo = batch_engine().run(mode, asks, STEADY), solo_runs(mode, 0.0, "shared_noise")
        check_rows([runs[0], runs[2]], [solo[0], solo[2]])
        assert (runs[1].finished.status, runs[1].finished.error) == ("failed", "OSError: nobody listens")

    @pytest.mark.parametrize("mode", MODES)
    def test_a_forward_that_one_row_spoils(self, mode: Mode) -> None:
        """The common forward fails; tried alone, only the row whose text has the poisoned token does."""
        solo = solo_runs(mode, 0.0, "shared_noise")
        poisoned = (tuple(ragged(3, V)[1].prompt) + solo[1].ids)[:9]

        def table(history: tuple[int, ...]) -> Sequence[float]:
            if history[: len(poisoned)] == poisoned:
                raise ModelError("the model returned NaN logits")
            return TARGET(history)

        runs = BatchEngine(ScriptedRunner(table, V), ScriptedRunner(PARTLY, V)).run(mode, ragged(3, V), STEADY)
        check_rows([runs[0], runs[2]], [solo[0], solo[2]])
        assert (runs[1].finished.status, runs[1].finished.error) == ("failed", "the model returned NaN logits")
        assert runs[1].ids == solo[1].ids[: len(runs[1].ids)]
        check_consistent(runs[1])

    @pytest.mark.parametrize("mode", ["sd", "ssd"])
    @pytest.mark.parametrize("number", [1, 2, 4])
    def test_a_draft_that_dies_is_lost_to_all_and_no_token_is(self, mode: Mode, number: int) -> None:
        def die(sent: int, message: object) -> None:
            if sent >= number:
                raise DraftUnavailable("the draft process was killed by signal 9.")

        runs = batch_engine(on_sent=die).run(mode, ragged(3, V), STEADY)
        solo = solo_runs("ar", 0.0, "shared_noise")[:3]
        for run, own in zip(runs, solo, strict=True):
            assert run.ids == own.ids
            assert notices(run) == [
                "The draft was lost: the draft process was killed by signal 9. The answer goes on without it."
            ]
            check_consistent(run)

    def test_a_draft_that_does_not_answer_is_given_up_once_for_all(self) -> None:
        ticks = iter(range(10_000))
        runs = batch_engine(deaf_from=3, clock=lambda: next(ticks) / 10).run("ssd", ragged(3, V), STEADY)
        assert [run.ids for run in runs] == [own.ids for own in solo_runs("ar", 0.0, "shared_noise")[:3]]
        assert all(len(notices(run)) == 1 and "did not answer within 5 s" in notices(run)[0] for run in runs)

    @pytest.mark.parametrize("number", [1, 3])
    def test_a_speculator_that_fails_leaves_its_own_row_without_a_draft(self, number: int) -> None:
        made = list[Speculator]()

        def make(runner: Any) -> Speculator:
            made.append(FailingSpeculator(runner, number) if len(made) == 1 else Speculator(runner))
            return made[-1]

        runs = batch_engine(make_speculator=make).run("ssd", ragged(3, V), STEADY)
        assert [run.ids for run in runs] == [own.ids for own in solo_runs("ar", 0.0, "shared_noise")[:3]]
        assert [len(notices(run)) for run in runs] == [0, 1, 0]
        assert "out of memory" in notices(runs[1])[0]
        solo = solo_runs("ssd", 0.0, "shared_noise")
        assert [facts(runs[0]), facts(runs[2])] == [facts(solo[0]), facts(solo[2])]

    def test_a_common_draft_forward_that_fails_leaves_all_without_a_draft(self) -> None:
        forwards = iter(range(1000))

        def table(history: tuple[int, ...]) -> Sequence[float]:
            if next(forwards) > 100:
                raise MemoryError
            return PARTLY(history)

        runs = batch_engine(table).run("ssd", ragged(3, V), STEADY)
        assert [run.ids for run in runs] == [own.ids for own in solo_runs("ar", 0.0, "shared_noise")[:3]]
        assert all(len(notices(run)) == 1 for run in runs)


class FailingSpeculator(Speculator):
    """Fails at its n-th answer or build."""

    def __init__(self, runner: Any, number: int) -> None:
        super().__init__(runner)
        self.left = number

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise MemoryError("out of memory")

    def begin_in_steps(self, request: Begin, batch_size: int = 1) -> Steps[Speculation]:
        self._count()
        return (yield from super().begin_in_steps(request, batch_size))

    def build_in_steps(self) -> Steps[bool]:
        self._count()
        return (yield from super().build_in_steps())
