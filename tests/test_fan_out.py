"""The shape of the speculation cache, and the estimates that it is planned from."""

import math
import random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import EXACT

from saguaro_core.config import MAX_BUDGET, MAX_LOOKAHEAD, SpeculationConfig
from saguaro_core.fan_out import (
    CacheState,
    FanOutPlanner,
    OutcomeEstimate,
    acceptance_probabilities,
    confident_fan_out,
    geometric_fan_out,
    length_probabilities,
    rank_share,
    round_to_budget,
    uniform_fan_out,
)

SHAPES = [(lookahead, budget) for lookahead in range(1, MAX_LOOKAHEAD + 1) for budget in range(1, MAX_BUDGET + 1)]


class TestShapes:
    def test_sum_to_the_budget_exactly_everywhere(self) -> None:
        for lookahead, budget in SHAPES:
            uniform = uniform_fan_out(lookahead, budget)
            shapes = [uniform] + [
                geometric_fan_out(lookahead, budget, a, r) for a in (0.01, 0.5, 0.8, 0.99) for r in (0.01, 0.7, 10.0)
            ]
            for shape in shapes:
                assert len(shape) == lookahead + 1
                assert sum(shape) == budget
                assert min(shape) >= 0
            assert max(uniform) - min(uniform) <= 1

    @EXACT
    @given(
        st.lists(st.floats(0, 1e6), min_size=1, max_size=17).filter(lambda weights: sum(weights) > 1e-9),
        st.integers(1, MAX_BUDGET),
    )
    def test_rounding_moves_no_share_by_a_whole_token(self, weights: list[float], budget: int) -> None:
        counts = round_to_budget(weights, budget)
        assert sum(counts) == budget
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - weight / sum(weights) * budget) < 1 + 1e-9
        assert all(count == 0 for count, weight in zip(counts, weights, strict=True) if weight == 0) or budget > sum(
            math.floor(weight / sum(weights) * budget) for weight in weights
        )

    def test_ties_go_to_the_shorter_acceptance(self) -> None:
        assert uniform_fan_out(3, 6) == (2, 2, 1, 1)
        assert uniform_fan_out(3, 2) == (1, 1, 0, 0)

    def test_acceptance_lengths_are_a_distribution(self) -> None:
        for lookahead in range(17):
            for a in (0.01, 0.3, 0.99):
                p = acceptance_probabilities(a, lookahead)
                assert len(p) == lookahead + 1
                assert math.fsum(p) == pytest.approx(1.0)
        assert acceptance_probabilities(0.5, 2) == [0.5, 0.25, 0.25]

    @pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.8, 0.95])
    @pytest.mark.parametrize("power_law_r", [0.2, 1.0, 3.0])
    @pytest.mark.parametrize("lookahead", [1, 3, 8])
    def test_theorem_12_before_rounding(self, acceptance: float, power_law_r: float, lookahead: int) -> None:
        """A budget so large that rounding is invisible leaves the theorem's proportions."""
        shape = geometric_fan_out(lookahead, 10**9, acceptance, power_law_r)
        decay = acceptance ** (1 / (1 + power_law_r))
        for k in range(lookahead):
            assert shape[k] == pytest.approx(shape[0] * decay**k, rel=1e-5)
        jump = (1 - acceptance) ** (-1 / (1 + power_law_r))
        assert shape[lookahead] == pytest.approx(shape[0] * decay**lookahead * jump, rel=1e-5)

    def test_decays_then_jumps_at_the_end(self) -> None:
        for a, r in ((0.7, 0.5), (0.9, 1.0), (0.8, 2.0)):
            shape = geometric_fan_out(5, 64, a, r)
            assert list(shape[:5]) == sorted(shape[:5], reverse=True)
            assert shape[0] > shape[4]
            assert shape[5] > shape[4]

    def test_theorem_12_beats_its_neighbours(self) -> None:
        """No move of one token between two lengths lowers the miss rate sum P(k) F_k^-r by more than rounding may."""
        a, r, budget = 0.75, 0.8, 40
        p = acceptance_probabilities(a, 4)

        def miss_rate(shape: tuple[int, ...]) -> float:
            return sum(chance * (count**-r if count else 1.0) for chance, count in zip(p, shape, strict=True))

        best = geometric_fan_out(4, budget, a, r)
        for source in range(5):
            for target in range(5):
                if source != target and best[source] > 1:
                    moved = list(best)
                    moved[source] -= 1
                    moved[target] += 1
                    assert miss_rate(tuple(moved)) > miss_rate(best) - 0.002
        assert miss_rate(best) < miss_rate(uniform_fan_out(4, budget)) - 0.005


class TestConfident:
    @EXACT
    @given(st.lists(st.floats(0.02, 0.98), max_size=8), st.integers(1, 64), st.floats(0.1, 3.0))
    def test_no_outcome_left_out_is_likelier_than_one_taken(
        self, acceptances: list[float], budget: int, power_law_r: float
    ) -> None:
        reach = length_probabilities(acceptances)
        assert math.fsum(reach) == pytest.approx(1.0)
        shape = confident_fan_out(reach, budget, power_law_r)
        assert sum(shape) == budget
        taken = [p * rank_share(count, power_law_r) for p, count in zip(reach, shape, strict=True) if count]
        left = [p * rank_share(count + 1, power_law_r) for p, count in zip(reach, shape, strict=True)]
        assert min(taken) >= max(left) - 1e-12

    def test_equal_acceptances_are_the_geometric_law(self) -> None:
        assert length_probabilities([0.7] * 5) == pytest.approx(acceptance_probabilities(0.7, 5))

    def test_the_planner_follows_the_tokens_and_a_fixed_a_goes_before_them(self) -> None:
        sure, doubtful = [0.98, 0.98, 0.98], [0.05, 0.98, 0.98]
        planner = FanOutPlanner(SpeculationConfig(lookahead=3, budget=8, fan_out="confident"))
        assert planner.shape_for(sure, "hit")[3] > 5
        assert planner.shape_for(doubtful, "hit")[0] > 5
        fixed = FanOutPlanner(SpeculationConfig(lookahead=3, budget=8, fan_out="confident", acceptance=0.5))
        assert fixed.shape_for(sure, "hit") == fixed.shape_for(doubtful, "hit")
        geometric = FanOutPlanner(SpeculationConfig(lookahead=3, budget=8, fan_out="geometric"))
        assert geometric.shape_for(sure, "hit") == geometric.shape(3, "hit") == geometric.shape_for(doubtful, "hit")


class TestPlanner:
    def test_uniform_and_list_policies(self) -> None:
        assert FanOutPlanner(SpeculationConfig(lookahead=3, fan_out="uniform", budget=8)).shape(3, "hit") == (
            2,
            2,
            2,
            2,
        )
        listed = FanOutPlanner(SpeculationConfig(lookahead=3, fan_out="list", fan_out_list=(5, 0, 2, 3)))
        assert listed.shape(3, "hit") == listed.shape(3, "miss") == (5, 0, 2, 3)
        # A shorter speculation ends with the entry for "all accepted".
        assert listed.shape(2, "hit") == (5, 0, 3)
        assert listed.shape(0, "miss") == (3,)

    @pytest.mark.parametrize("fan_out", ["geometric", "uniform"])
    def test_a_shorter_speculation_still_spends_the_budget(self, fan_out: str) -> None:
        planner = FanOutPlanner(SpeculationConfig(lookahead=8, budget=12, fan_out=fan_out))  # type: ignore[arg-type]
        for drafted in range(9):
            shape = planner.shape(drafted, "hit")
            assert len(shape) == drafted + 1
            assert sum(shape) == 12

    def test_fixed_values_override_the_estimates(self) -> None:
        config = SpeculationConfig(lookahead=4, budget=20, acceptance=0.9, power_law_r=0.5)
        planner = FanOutPlanner(config)
        before = planner.shape(4, "hit")
        for _ in range(100):
            planner.observe("hit", 4, 0, 1, 64)
        assert planner.shape(4, "hit") == before == geometric_fan_out(4, 20, 0.9, 0.5)

    def test_each_cache_state_learns_for_itself(self) -> None:
        planner = FanOutPlanner(SpeculationConfig(lookahead=4, budget=20))
        untouched = planner.shape(4, "miss")
        assert planner.shape(4, "hit") == untouched
        for _ in range(200):
            planner.observe("hit", 4, 4, 1, 64)
        assert planner.shape(4, "miss") == untouched
        assert planner.shape(4, "hit")[4] > untouched[4]
        assert planner.estimates["hit"].acceptance > 0.9
        assert set(planner.estimates) == set(get_args(CacheState))


def true_rank(generator: random.Random, power_law_r: float) -> int:
    """A rank with P(rank > F) = (F + 1)^-r."""
    return int(math.pow(generator.random(), -1 / power_law_r))


class TestEstimates:
    @pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.8, 0.95])
    def test_recover_a(self, acceptance: float) -> None:
        generator, estimate = random.Random(1), OutcomeEstimate()
        for _ in range(4000):
            accepted = 0
            while accepted < 4 and generator.random() < acceptance:
                accepted += 1
            estimate.observe(4, accepted, None, 0)
        # At least 4,000 trials: a standard error of at most 0.008.
        assert estimate.acceptance == pytest.approx(acceptance, abs=0.04)

    @pytest.mark.parametrize("power_law_r", [0.3, 0.6, 1.0, 1.8])
    @pytest.mark.parametrize("num_kept", [8, 64])
    def test_recover_r(self, power_law_r: float, num_kept: int) -> None:
        generator, estimate = random.Random(2), OutcomeEstimate()
        for _ in range(8000):
            rank = true_rank(generator, power_law_r)
            estimate.observe(4, 2, rank if rank <= num_kept else None, num_kept)
        # A standard error below 2%; reading whole ranks as continuous ones biases by up to 20%.
        assert estimate.power_law_r == pytest.approx(power_law_r, rel=0.25)

    def test_a_censored_rank_lowers_r_and_an_unknown_one_changes_nothing(self) -> None:
        censored, unknown = OutcomeEstimate(), OutcomeEstimate()
        before = censored.power_law_r
        censored.observe(4, 1, None, 64)
        unknown.observe(4, 1, None, 0)
        assert censored.power_law_r < before
        assert unknown.power_law_r == before

    def test_an_accepted_block_is_no_rejection(self) -> None:
        estimate = OutcomeEstimate()
        for _ in range(10_000):
            estimate.observe(8, 8, 1, 64)
        assert 0.999 < estimate.acceptance < 1
        for _ in range(50):
            estimate.observe(0, 0, 1, 64)
        assert estimate.rejected == OutcomeEstimate().rejected

    @EXACT
    @given(
        st.lists(
            st.tuples(st.integers(0, 16), st.integers(0, 16), st.none() | st.integers(1, 64)).map(
                lambda seen: (seen[0], min(seen[:2]), seen[2])
            ),
            max_size=60,
        ),
        st.integers(1, MAX_BUDGET),
    )
    def test_whatever_is_seen_the_shape_stays_valid(
        self, rounds: list[tuple[int, int, int | None]], budget: int
    ) -> None:
        planner = FanOutPlanner(SpeculationConfig(lookahead=16, budget=budget))
        for drafted, accepted, rank in rounds:
            planner.observe("miss", drafted, accepted, rank, 64)
        estimate = planner.estimates["miss"]
        assert 0 < estimate.acceptance < 1
        assert estimate.power_law_r > 0
        shape = planner.shape(16, "miss")
        assert sum(shape) == budget
        assert min(shape) >= 0
