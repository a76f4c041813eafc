"""How long a speculation is served: the rule against closed forms and search, and that it is followed and reported."""

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedRunner, hashed
from strategies import EXACT
from test_speculator import PROMPT, K, V, begin, build, check_trunk, prepared

from saguaro_core.config import SamplingParams, SpeculationConfig
from saguaro_core.deepening import best_rows, is_worth_its_time
from saguaro_core.draft.lessons import Lessons
from saguaro_core.draft.messages import Speculation
from saguaro_core.draft.speculator import Speculator
from saguaro_core.row_times import RowTimes
from saguaro_core.service import MIN_ROUNDS, RunTimes, best_length
from saguaro_core.verification import Outcome


class TestBestLength:
    def test_tokens_are_served_while_they_bring_more_than_their_row_costs(self) -> None:
        for a, cost in itertools.product((0.2, 0.5, 0.8, 0.95), (0.01, 0.1, 0.3, 0.55, 0.9, 2.0)):
            assert best_length([a] * 8, cost) == sum(a**i > cost for i in range(1, 9))

    def test_a_doubtful_token_keeps_back_the_sure_ones_behind_it(self) -> None:
        assert best_length([0.2, 0.98, 0.98, 0.98], 0.3) == 0
        assert best_length([0.5, 0.98, 0.98, 0.1], 0.3) == 3
        assert best_length([], 0.3) == 0

    @EXACT
    @given(st.lists(st.floats(0.05, 0.95), max_size=6), st.floats(0, 1))
    def test_no_other_length_is_better(self, acceptances: list[float], cost: float) -> None:
        def value(n: int) -> float:
            return math.fsum(math.prod(acceptances[:i]) for i in range(1, n + 1)) - cost * n

        best = best_length(acceptances, cost)
        assert value(best) >= max(value(n) for n in range(len(acceptances) + 1)) - 1e-9


class TestNextToken:
    """Rate 4 tokens a second, a step of 0.02 s, rows that cost nothing: a drafted token must bring more than 0.16."""

    def times(self, accepted: int = 3) -> RunTimes:
        times = RunTimes(verify=RowTimes(prior_slope=1e-9))
        for _ in range(30):
            times.observe_round("neural", 3, accepted, verify_seconds=0.9, seconds=1.0)
            times.observe_step(0.02)
        times._tokens, times._seconds = 4.0, 1.0
        return times

    def test_what_brings_most_beyond_its_time_is_taken(self) -> None:
        times = self.times()
        a = times.acceptance("neural")
        assert times.next_token("neural", 1.0, 0.0) == "drafted"
        assert times.next_token("neural", 1.0, a) == "guess"
        assert times.next_token("neural", 1.0, a - 0.15) == "guess"
        assert times.next_token("neural", 1.0, a - 0.17) == "drafted"
        assert times.next_token("neural", 0.15, 0.0) == "nothing"
        assert times.next_token("neural", 0.15, 0.01) == "guess"

    def test_nothing_of_the_drafts_own_follows_a_guess(self) -> None:
        assert self.times().next_token(None, 1.0, 0.0) == "nothing"
        assert self.times().next_token(None, 1.0, 0.5) == "guess"

    def test_a_draft_that_is_never_right_is_not_asked(self) -> None:
        assert self.times(accepted=0).next_token("neural", 1.0, 0.0) == "nothing"


class TestRowTimes:
    def test_a_line_is_found(self) -> None:
        times = RowTimes(prior_slope=0.04)
        for rows in [1, 4, 5, 8] * 60:
            times.add(rows, 0.030 + 0.002 * rows)
        assert times.seconds(6) == pytest.approx(0.042, rel=0.01)
        assert times.per_row == pytest.approx(0.002, rel=0.05)
        assert times.fixed == pytest.approx(0.030, rel=0.02)

    def test_before_row_counts_differ_the_prior_gives_the_slope(self) -> None:
        times = RowTimes(prior_slope=0.05)
        for _ in range(5):
            times.add(4, 0.040)
        assert times.per_row == pytest.approx(0.002)
        assert times.seconds(4) == pytest.approx(0.040)

    def test_more_rows_are_never_taken_to_be_faster_and_one_stall_changes_little(self) -> None:
        times = RowTimes(prior_slope=0.0)
        for rows, seconds in [(1, 0.040), (8, 0.010)] * 9:
            times.add(rows, seconds)
        assert times.per_row == 0.0
        before = times.mean_seconds
        times.add(4, 60.0)
        assert times.mean_seconds < 1.2 * before


class TestDeepening:
    @EXACT
    @given(st.lists(st.floats(0.001, 1), min_size=1, max_size=20), st.floats(0.1, 20), st.floats(0.01, 3))
    def test_the_rows_have_the_greatest_worth_per_time(self, worths: list[float], fixed: float, row: float) -> None:
        worths.sort(reverse=True)
        ratios = [sum(worths[:n]) / (fixed + n * row) for n in range(1, len(worths) + 1)]
        assert ratios[best_rows(worths, fixed, row) - 1] == pytest.approx(max(ratios))

    def test_closed_cases(self) -> None:
        assert best_rows([], 1.0, 1.0) == 0
        assert best_rows([0.5, 0.5, 0.5], 1.0, 1.0) == 3
        assert best_rows([0.9, 0.001], 0.1, 1.0) == 1
        assert best_rows([0.5, 0.1], 1.0, 0.0) == 2
        assert is_worth_its_time(0.1, -1.0, rate=99.0)
        assert is_worth_its_time(0.1, 0.5, rate=0.19)
        assert not is_worth_its_time(0.1, 0.5, rate=0.21)


@dataclass
class Scene:
    """A speculator by a clock that only its own forwards and the target's verdicts move."""

    forward_seconds: float
    verify_seconds: float
    now: float = 0.0
    number: int = 0
    table_salt: int = 1
    speculator: Speculator = field(init=False)

    def __post_init__(self) -> None:
        runner = ScriptedRunner(hashed(V, 2.0, salt=self.table_salt), V, on_forward=self._forward)
        self.speculator = Speculator(runner, clock=lambda: self.now)

    def _forward(self, number: int) -> None:
        self.now += self.forward_seconds

    def verdict(self, outcome: Outcome):  # type: ignore[no-untyped-def]
        self.number += 1
        # The draft works while the target does; the verdict comes when both are done.
        self.now = max(self.now, self.speculator._answered + self.verify_seconds)
        return self.speculator.verified(self.number, outcome, K, self.verify_seconds)

    def miss(self, passes: int = 0):  # type: ignore[no-untyped-def]
        build(self.speculator, passes)
        drafted = self.speculator.drafted.token_ids
        others = set(range(V)) - set(drafted[:1]) - set(prepared(self.speculator, 0))
        return self.verdict(Outcome(0, min(others)))

    def accept(self) -> Speculation:
        build(self.speculator)
        k = len(self.speculator.drafted.token_ids)
        answer: Speculation = self.verdict(Outcome(k, prepared(self.speculator, k)[0]))
        return answer


class TestChoices:
    def test_nothing_is_cut_before_enough_was_measured_and_then_misses_of_a_dear_draft_are_plain(self) -> None:
        scene = Scene(0.5, verify_seconds=1.0)
        assert scene.speculator.begin(begin()).served == "full"
        answers = [scene.miss() for _ in range(MIN_ROUNDS + 4)]
        assert {answer.served for answer in answers[: MIN_ROUNDS - 1]} == {"full"}
        assert (answers[-1].served, answers[-1].fallback, answers[-1].token_ids) == ("plain", "none", ())

    @pytest.mark.parametrize(
        ("forward_seconds", "served", "fallback"),
        [(0.01, "full", "neural"), (0.05, "short", "neural"), (0.5, "plain", "none")],
    )
    def test_a_miss_is_served_by_what_a_token_costs(self, forward_seconds: float, served: str, fallback: str) -> None:
        scene = Scene(forward_seconds, verify_seconds=1.0)
        scene.speculator.begin(begin())
        for _ in range(12):
            assert scene.accept().cache == "hit"
        answer = scene.miss(passes=1)
        assert (answer.served, answer.fallback) == (served, fallback)
        check_trunk(scene.speculator, is_built=False)

    @pytest.mark.parametrize(("service", "is_extended"), [("full", True), ("auto", False)])
    def test_a_branch_cut_short_is_drafted_on_where_all_must_be_full(self, service: str, is_extended: bool) -> None:
        scene = Scene(0.01, verify_seconds=1.0)
        scene.speculator.begin(begin(deepening="all", service=service))
        for _ in range(12):
            scene.accept()
        build(scene.speculator, 2)
        k = len(scene.speculator.drafted.token_ids)
        answer = scene.verdict(Outcome(k, prepared(scene.speculator, k)[0]))
        assert answer.cache == "hit"
        assert (answer.served, len(answer.token_ids)) == (("full", K) if is_extended else ("short", 1))
        check_trunk(scene.speculator, is_built=False)

    def test_full_and_ready_do_not_look_at_times(self) -> None:
        for service, hit in (("full", K), ("ready", 1)):
            scene = Scene(5.0, verify_seconds=1.0)
            scene.speculator.begin(begin(service=service, deepening="all"))
            assert {scene.miss().served for _ in range(MIN_ROUNDS + 3)} == {"full"}
            build(scene.speculator, 2)
            assert len(scene.verdict(Outcome(0, prepared(scene.speculator, 0)[0])).token_ids) == hit

    def test_the_draft_leaves_a_pass_that_would_keep_the_target_waiting(self) -> None:
        """A forward takes 0.3 of a verification: the trunk, then the first pass; a third one would come too late."""
        scene = Scene(0.3, verify_seconds=0.95)
        scene.speculator.begin(begin(budget=6))
        for _ in range(MIN_ROUNDS + 4):
            scene.accept()
        started = scene.now
        build(scene.speculator)
        assert scene.now - started == pytest.approx(0.9)
        assert max(scene.speculator.branches.cache.lengths) == 2

    def test_likely_branches_grow_first_and_every_pass_takes_the_slots_that_follow(self) -> None:
        scene = Scene(0.1, verify_seconds=1.0)
        scene.speculator.begin(begin(budget=15, fan_out="geometric"))
        scene.speculator.build_step()
        branches, used = scene.speculator.branches, [scene.speculator.branches.used]
        grown = []
        while scene.speculator.build_step():
            used.append(branches.used)
            grown.append(list(branches.cache.lengths))
        assert grown[0] == [1] * 15
        deeper = [branch for branch, length in enumerate(grown[1]) if length == 2]
        assert 0 < len(deeper) < 15
        others = set(range(15)) - set(deeper)
        first_q, confidence = [branches.q_of(b)[0] for b in range(15)], scene.speculator.lessons.confidence
        worth = [chance * confidence.acceptance(q) for chance, q in zip(branches.chances, first_q, strict=True)]
        assert min(worth[b] for b in deeper) >= max(worth[b] for b in others)
        slots = sorted(slot for own in branches.slots for slot in own)
        assert slots == list(range(branches.trunk_length, branches.used))
        assert set(branches.cache.lengths) == {K}


class TestDrawnTokens:
    """Where tokens are drawn from the draft, what is said must not depend on times."""

    def test_the_same_tokens_however_far_the_draft_had_come(self) -> None:
        sampling = SamplingParams(temperature=1.0, seed=5)
        said = set()
        for passes, forward_seconds, deepening in itertools.product((0, 1, 2, 3, 9), (0.001, 3.0), ("all", "likely")):
            scene = Scene(forward_seconds, verify_seconds=1.0)
            first = scene.speculator.begin(
                begin(PROMPT, sampling=sampling, rule="rejection", saguaro_c=0.5, deepening=deepening)
            )
            answers = [first]
            for number in range(7):
                build(scene.speculator, passes)
                accepted = min(number % (K + 1), len(answers[-1].token_ids))
                answers.append(scene.verdict(Outcome(accepted, (3 * number) % V)))
            assert {answer.served for answer in answers} == {"full"}
            said.add(tuple((answer.token_ids, answer.cache, answer.fallback, answer.q) for answer in answers))
        assert len(said) == 1

    def test_a_table_from_earlier_answers_is_not_looked_into(self) -> None:
        for rule, fallback in (("rejection", "none"), ("shared_noise", "pair")):
            speculator = Scene(0.1, 1.0).speculator
            for _ in range(3):
                speculator.experience.pairs.table.learn(PROMPT[-1], [9, 9])
            sampling = SamplingParams(temperature=1.0, seed=5)
            assert speculator.begin(begin(sampling=sampling, rule=rule, fallback="fast")).fallback == fallback


def test_times_are_not_judged_before_they_are_known() -> None:
    times = RunTimes()
    for number in range(MIN_ROUNDS):
        assert times.length([0.9] * 4) is None
        times.observe_round("neural", 4, 4, verify_seconds=1.0, seconds=1.0)
        assert times.rate is None or number == MIN_ROUNDS - 1
    assert times.length([0.9] * 4) == 4
    # A step has never been timed.
    assert times.next_token("neural", 1.0, 0.0) is None
    times.observe_step(0.001)
    assert times.next_token("neural", 1.0, 0.0) == "drafted"
    assert times.next_token("neural", 1e-4, 0.0) == "nothing"


@pytest.mark.parametrize(("batch_size", "waiting", "expected"), [(1, 1.0, 3), (8, 1.0, 3), (8, 2.0, 2), (8, 8.0, 0)])
def test_in_a_batch_a_step_must_be_worth_the_time_of_all_who_wait(
    batch_size: int, waiting: float, expected: int
) -> None:
    times = RunTimes(batch_size=batch_size, waiting=waiting)
    for _ in range(20):
        times.observe_round("neural", 3, 2, verify_seconds=0.1, seconds=0.1)
        times.observe_step(0.003)
    # Rows of equal count have the prior's slope, which is almost nothing here.
    times.verify = RowTimes(prior_slope=1e-6)
    for _ in range(MIN_ROUNDS):
        times.verify.add(4, 0.1)
    acceptance = times.acceptance("neural")
    assert [times.next_token("neural", acceptance**n, 0.0) for n in range(3)].count("drafted") == expected


def test_lookup_alone_serves_a_miss_where_the_request_or_the_theorem_says_so() -> None:
    assert Lessons(SpeculationConfig(fallback="fast")).prefers_lookup()
    assert not Lessons(SpeculationConfig(fallback="neural")).prefers_lookup()
    lessons = Lessons(SpeculationConfig(fallback="auto", service="ready"))
    assert not lessons.prefers_lookup()
    for _ in range(30):  # A draft that is slower than a verification and never right.
        lessons.chooser.observe_fallback("neural", 3.0)
        lessons.chooser.observe_round(False, 0, 1.0)
    assert lessons.prefers_lookup()


class TestGuesses:
    """Tokens that the text alone suggests, behind the draft's own or in their place."""

    def scene(self, forward_seconds: float, **speculation: Any) -> Scene:
        scene = Scene(forward_seconds, verify_seconds=1.0)
        scene.speculator.begin(begin([*range(10), *range(10)], copying="ngram", fallback="auto", **speculation))
        for _ in range(MIN_ROUNDS + 2):
            scene.miss()
        return scene

    def test_a_miss_in_known_text_is_served_by_guesses_when_the_draft_is_slow(self) -> None:
        scene = self.scene(0.6)
        scene.verdict(Outcome(0, 3))
        answer = scene.verdict(Outcome(0, 4))
        assert (answer.fallback, answer.q) == ("ngram", ())
        assert answer.token_ids[:3] == (5, 6, 7)

    def test_they_stand_behind_the_drafts_own_tokens_and_have_no_q(self) -> None:
        scene, found = self.scene(0.001), set()
        for _ in range(40):
            answer = scene.miss(passes=2)
            drafted = scene.speculator.drafted
            assert len(answer.q) + len(drafted.guessed) == len(answer.token_ids)
            assert len(scene.speculator.lessons.acceptances(drafted)) == len(answer.token_ids)
            trunk = scene.speculator.trunk.token_ids
            assert trunk == (scene.speculator.context + drafted.token_ids)[: len(trunk)]
            found.add((bool(answer.q), bool(drafted.guessed)))
        assert {(True, True), (True, False)} & found
        assert any(guessed for _, guessed in found)

    def test_a_hit_gets_guesses_behind_what_is_ready(self) -> None:
        scene, found = self.scene(0.6, deepening="all"), 0
        for _ in range(20):
            build(scene.speculator, 2)
            k = len(scene.speculator.drafted.token_ids)
            answer = scene.verdict(Outcome(k, prepared(scene.speculator, k)[0]))
            assert answer.cache == "hit"
            found += len(answer.token_ids) > len(answer.q) > 0
        assert found

    def test_where_tokens_are_drawn_and_in_sd_nothing_is_guessed(self) -> None:
        sampling = SamplingParams(temperature=1.0, seed=5)
        prompt = [*range(10), *range(10)]
        for request in (
            begin(prompt, sampling=sampling, rule="rejection", copying="ngram"),
            begin(prompt, mode="sd", copying="ngram"),
        ):
            scene = Scene(0.6, verify_seconds=1.0)
            scene.speculator.begin(request)
            for number in range(MIN_ROUNDS + 4):
                answer = scene.verdict(Outcome(0, number % 10))
                assert len(answer.q) == len(answer.token_ids) == K
