"""How long a speculation is served: the rule against closed forms and search, and that it is followed and reported."""

import itertools
import math
from dataclasses import dataclass, field

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
    def length(self, ready: int, acceptance: float, rate: float, step: float, row: float = 0.0) -> int:
        return best_length(ready, [acceptance] * 8, rate=rate, step_seconds=step, row_seconds=row)[0]

    def test_drafts_while_the_next_token_is_worth_more_than_its_time(self) -> None:
        """With even costs the best n is the number of i with a^i > rate * cost."""
        for a, cost in itertools.product((0.2, 0.5, 0.8, 0.95), (0.01, 0.1, 0.3, 0.55, 0.9, 2.0)):
            wanted = sum(a**i > cost for i in range(1, 9))
            assert self.length(0, a, 1.0, cost) == wanted
            assert self.length(0, a, 2.0, cost / 4, row=cost / 4) == wanted
            assert self.length(3, a, 1.0, cost) == max(3, wanted)

    def test_free_tokens_are_all_taken_and_dear_ones_never(self) -> None:
        assert self.length(0, 0.5, 5.0, 0.0) == 8
        assert self.length(0, 0.99, 5.0, 10.0) == 0
        assert self.length(5, 0.9, 5.0, 10.0) == 5

    def test_ready_tokens_that_cost_more_rows_than_they_bring_stay_behind(self) -> None:
        assert self.length(8, 0.5, 1.0, 0.0, row=0.3) == 1

    def test_a_doubtful_token_keeps_back_the_sure_ones_behind_it(self) -> None:
        costs = {"rate": 1.0, "step_seconds": 0.0, "row_seconds": 0.3}
        assert best_length(4, [0.2, 0.98, 0.98, 0.98], **costs) == (0, 0.0)
        best, worth = best_length(4, [0.5, 0.98, 0.98, 0.1], **costs)
        assert best == 3
        assert worth == pytest.approx(0.5 + 0.49 + 0.4802 - 0.9)

    @EXACT
    @given(
        st.integers(0, 6),
        st.lists(st.floats(0.05, 0.95), min_size=6, max_size=6),
        st.floats(0.1, 10),
        st.floats(0, 1),
        st.floats(0, 1),
    )
    def test_no_other_length_is_better(
        self, ready: int, acceptances: list[float], rate: float, step: float, row: float
    ) -> None:
        def value(n: int) -> float:
            tokens = math.fsum(math.prod(acceptances[:i]) for i in range(1, n + 1))
            return tokens - rate * (step * max(0, n - ready) + row * n)

        best, worth = best_length(ready, acceptances, rate=rate, step_seconds=step, row_seconds=row)
        assert worth == pytest.approx(value(best))
        assert worth >= max(value(n) for n in range(7)) - 1e-9


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
        [(0.01, "full", "neural"), (0.1, "short", "neural"), (0.5, "plain", "none")],
    )
    def test_a_miss_is_served_by_what_a_token_costs(self, forward_seconds: float, served: str, fallback: str) -> None:
        scene = Scene(forward_seconds, verify_seconds=1.0)
        scene.speculator.begin(begin())
        for _ in range(12):
            assert scene.accept().cache == "hit"
        answer, times = scene.miss(passes=1), scene.speculator.times
        assert (answer.served, answer.fallback) == (served, fallback)
        reached = math.prod(scene.speculator.lessons.acceptances(scene.speculator.drafted))
        assert served == "full" or times.wants_more("neural", reached) is False
        check_trunk(scene.speculator, is_built=False)

    @pytest.mark.parametrize(("forward_seconds", "is_extended"), [(0.01, True), (0.9, False)])
    def test_a_branch_cut_short_is_drafted_on_when_that_pays(self, forward_seconds: float, is_extended: bool) -> None:
        scene = Scene(forward_seconds, verify_seconds=1.0)
        scene.speculator.begin(begin(deepening="all"))
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
                speculator.pairs.table.learn(PROMPT[-1], [9, 9])
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
    assert times.wants_more("neural", 1.0) is None
    assert times.prefers_lookup("ngram", 2, 4) is None
    times.observe_step(0.001)
    assert times.wants_more("neural", 1.0)
    assert not times.wants_more("neural", 1e-4)


@pytest.mark.parametrize(("batch_size", "waiting", "expected"), [(1, 1.0, 3), (8, 1.0, 3), (8, 2.0, 2), (8, 8.0, 0)])
def test_in_a_batch_a_step_must_be_worth_the_time_of_all_who_wait(
    batch_size: int, waiting: float, expected: int
) -> None:
    times = RunTimes(batch_size=batch_size, waiting=waiting)
    for _ in range(20):
        times.observe_round("neural", 3, 2, verify_seconds=0.1, seconds=0.1)
        times.observe_step(0.006)
    # Rows of equal count have the prior's slope, which is almost nothing here.
    times.verify = RowTimes(prior_slope=1e-6)
    for _ in range(MIN_ROUNDS):
        times.verify.add(4, 0.1)
    acceptance = times.acceptance("neural")
    assert sum(bool(times.wants_more("neural", acceptance**n)) for n in range(3)) == expected


@pytest.mark.parametrize(("accepted", "found", "expected"), [(2, 2, True), (0, 2, False), (2, 0, False)])
def test_a_lookup_that_is_worth_more_than_drafting_comes_first(accepted: int, found: int, expected: bool) -> None:
    lessons = Lessons(SpeculationConfig(lookahead=K))
    for _ in range(12):
        lessons.times.observe_step(0.3)
        lessons.times.observe_round("ngram", 2, accepted, verify_seconds=1.0, seconds=1.3)
    assert lessons.prefers_lookup("ngram", found, K) is expected
    assert not Lessons(SpeculationConfig(lookahead=K, fallback="neural")).prefers_lookup("ngram", 2, K)
