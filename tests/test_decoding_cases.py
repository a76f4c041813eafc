"""Failure classes of speculative decoders, each as a small input: ends, cuts, rollback."""

from collections.abc import Sequence
from typing import Any

import pytest
from decoding_runs import BOTH, PROMPT, TARGET, ar_ids, check_consistent, engine, greedy
from local_engine import LocalRun
from scripted import Table

from saguaro_core.config import Mode, SpeculationConfig
from saguaro_core.draft.messages import Verified
from saguaro_core.errors import InvalidRequest

# Where the draft is the target, every speculation is K tokens long and right: no copy, no lookup, nothing cut by times.
PLAIN: Any = {"copying": "off", "service": "full", "fallback": "neural"}


class TestEndOfTurn:
    @pytest.mark.parametrize("lookahead", range(1, 9))
    @pytest.mark.parametrize("mode", BOTH)
    def test_at_every_offset_of_a_block_cuts_as_ar_does(self, mode: Mode, lookahead: int) -> None:
        answer = ar_ids(40)
        for eos in sorted(set(answer[4:30])):
            subject = engine(eos=frozenset({eos}))
            plain = subject.run("ar", PROMPT, greedy(40))
            run = subject.run(mode, PROMPT, greedy(40), SpeculationConfig(lookahead=lookahead, **PLAIN))
            assert run.ids == plain.ids == answer[: answer.index(eos) + 1]
            assert run.finished.stop_reason == "eos"
            assert run.finished.text == plain.finished.text
            check_consistent(run)
            # The target's rounds are as few as the tokens need: an end on the bonus token costs no further one.
            assert len(run.rounds) == -(-len(run.ids) // (lookahead + 1))

    def test_the_draft_is_not_asked_again_after_the_end(self) -> None:
        answer = ar_ids(40)
        sent: list[object] = []
        subject = engine(eos=frozenset({answer[17]}), on_sent=sent.append)
        run = subject.run("ssd", PROMPT, greedy(40), SpeculationConfig(lookahead=4, **PLAIN))
        assert run.finished.stop_reason == "eos"
        assert sum(isinstance(message, Verified) for message in sent) == len(run.rounds) - 1
        assert subject.speculator is not None
        assert not subject.speculator.is_building

    @pytest.mark.parametrize("mode", ["ar", *BOTH])
    def test_sets_of_ends(self, mode: Mode) -> None:
        answer = ar_ids(40)
        first, second = answer[25], answer[12]
        both = engine(eos=frozenset({first, second})).run(mode, PROMPT, greedy(40))
        cut = min(answer.index(first), answer.index(second))
        assert (both.ids, both.finished.stop_reason) == (answer[: cut + 1], "eos")
        none = engine(eos=frozenset()).run(mode, PROMPT, greedy(40))
        assert (none.ids, none.finished.stop_reason) == (answer, "length")


class TestCachesStayWhole:
    """At temperature 0 outputs stay right even with a hole in the draft's cache: lengths and contents are checked."""

    def run(self, mode: Mode, draft: Table, count: int, **speculation: Any) -> LocalRun:
        subject = engine(draft)

        def check(events: object) -> None:
            speculator = subject.speculator
            if speculator is None or not speculator.context:
                return
            drafted = speculator.drafted.token_ids
            trunk = speculator.context + drafted
            # SD has not fed its last drafted token yet; SSD has, while it built the cache.
            if mode == "ssd" or drafted:
                assert speculator.cached == len(trunk) - (mode == "sd")
            self.check_slots(subject.draft, trunk[: speculator.cached])

        run = subject.run(
            mode, PROMPT, greedy(count), SpeculationConfig(**{"copying": "off", **speculation}), on_events=check
        )
        target = run.loop.run_context.target
        assert target.num_cached == len(run.loop.context) - 1
        self.check_slots(subject.target, run.loop.context[: target.num_cached])
        check_consistent(run)
        return run

    def check_slots(self, runner: Any, trunk: Sequence[int]) -> None:
        assert [runner.slots[0, slot] for slot in range(len(trunk))] == list(enumerate(trunk))

    @pytest.mark.parametrize("mode", BOTH)
    @pytest.mark.parametrize("lookahead", [1, 4, 8])
    def test_a_perfect_draft_is_accepted_to_the_end(self, mode: Mode, lookahead: int) -> None:
        run = self.run(mode, TARGET, 256, lookahead=lookahead, budget=12, **PLAIN)
        assert run.finished.figures.draft_acceptance_rate == 1.0
        assert all(event.accepted == event.drafted for event in run.rounds)
        assert all(event.drafted == lookahead for event in run.rounds[:-1])

    @pytest.mark.parametrize("mode", BOTH)
    def test_a_scripted_rejection_at_each_position(self, mode: Mode) -> None:
        for position in range(4):
            answer = ar_ids(60)

            def wrong_there(history: tuple[int, ...], at: int = position) -> list[float]:
                scores = list(TARGET(history))
                if (len(history) - len(PROMPT)) % 5 == at:
                    scores.reverse()
                return scores

            run = self.run(mode, wrong_there, 60, lookahead=4, budget=20)
            assert run.ids == answer
            assert {event.accepted for event in run.rounds} & {0, 1, 2, 3}
            late = run.rounds[len(run.rounds) // 2 :]
            assert sum(event.accepted for event in late) > 0

    def test_with_one_prepared_outcome_each_every_round_of_a_perfect_draft_is_a_hit(self) -> None:
        for options in ({"fan_out": "uniform", "budget": 5}, {"fan_out": "list", "fan_out_list": (1,) * 5}):
            run = self.run("ssd", TARGET, 256, lookahead=4, **options, **PLAIN)
            assert [event.cache for event in run.rounds] == ["compulsory"] + ["hit"] * (len(run.rounds) - 1)
            assert run.finished.figures.cache_hit_rate == 1.0
            assert run.finished.figures.draft_acceptance_rate == 1.0

    @pytest.mark.parametrize("rule", ["shared_noise", "rejection"])
    @pytest.mark.parametrize("mode", BOTH)
    def test_a_perfect_draft_is_accepted_when_sampling_too(self, mode: Mode, rule: str) -> None:
        subject = engine()
        sampling = greedy(200, temperature=1.0, top_p=0.9, seed=3)
        run = subject.run(mode, PROMPT, sampling, SpeculationConfig(lookahead=4, rule=rule, **PLAIN))  # type: ignore[arg-type]
        assert run.finished.figures.draft_acceptance_rate == 1.0


class TestCap:
    @pytest.mark.parametrize("cap", [1, 2, 3, 7, 8, 9, 10])
    @pytest.mark.parametrize("mode", ["ar", *BOTH])
    def test_is_met_exactly(self, mode: Mode, cap: int) -> None:
        run = engine().run(mode, PROMPT, greedy(cap), SpeculationConfig(lookahead=8, **PLAIN))
        assert run.ids == ar_ids(10)[:cap]
        assert run.finished.stop_reason == "length"
        check_consistent(run)
        done = 0
        for event in run.rounds:
            assert event.drafted <= cap - done - 1
            done += event.num_committed

    @pytest.mark.parametrize("cap", [0, -1, 10**9 + 1])
    def test_useless_values_are_refused(self, cap: int) -> None:
        with pytest.raises(InvalidRequest, match=f"max_new_tokens is {cap}"):
            greedy(cap)

    @pytest.mark.parametrize("mode", ["ar", *BOTH])
    def test_a_cap_of_one_has_no_acceptance_rate(self, mode: Mode) -> None:
        figures = engine().run(mode, PROMPT, greedy(1)).finished.figures
        assert (figures.num_tokens, figures.draft_acceptance_rate, figures.cache_hit_rate) == (1, None, None)
        assert figures.decode_tokens_per_second is None


class TestStopAndCap:
    """Tokens read as letters, so a stop string is a run of tokens."""

    def letters(self, first: int, last: int) -> str:
        return "".join(chr(ord("a") + token) for token in ar_ids(40)[first : last + 1])

    @pytest.mark.parametrize("mode", ["ar", *BOTH])
    @pytest.mark.parametrize("lookahead", [1, 5, 16])
    def test_the_earlier_of_stop_and_cap_wins(self, mode: Mode, lookahead: int) -> None:
        config = SpeculationConfig(lookahead=lookahead, **PLAIN)
        stopped = engine().run(mode, PROMPT, greedy(5, stop=(self.letters(1, 2),)), config)
        assert (len(stopped.ids), stopped.finished.stop_reason) == (3, "stop")
        assert stopped.finished.text == self.letters(0, 0)
        capped = engine().run(mode, PROMPT, greedy(5, stop=(self.letters(4, 5),)), config)
        assert (len(capped.ids), capped.finished.stop_reason) == (5, "length")
        assert capped.finished.text == self.letters(0, 4)
        for run in (stopped, capped):
            check_consistent(run)

    @pytest.mark.parametrize("mode", ["ar", *BOTH])
    def test_the_earliest_completion_wins_not_the_order_of_the_list(self, mode: Mode) -> None:
        for stops in ((self.letters(9, 11), self.letters(6, 7)), (self.letters(6, 7), self.letters(9, 11))):
            run = engine().run(mode, PROMPT, greedy(30, stop=stops), SpeculationConfig(lookahead=16, **PLAIN))
            assert run.finished.text == self.letters(0, 5)
            check_consistent(run)

    @pytest.mark.parametrize("lookahead", range(1, 9))
    def test_at_every_offset_all_modes_say_the_same(self, lookahead: int) -> None:
        for first in range(2, 14):
            stop = (self.letters(first, first + 2),)
            runs = [
                engine().run(mode, PROMPT, greedy(30, stop=stop), SpeculationConfig(lookahead=lookahead, **PLAIN))
                for mode in ("ar", *BOTH)
            ]
            assert len({(run.ids, run.finished.text, run.finished.stop_reason) for run in runs}) == 1
            for run in runs:
                check_consistent(run)
