"""The event simulation: hand-computed timelines, the closed forms where they hold, and invariants everywhere.

Statistical comparisons use a fixed seed; their tolerance of 4% is over 5 standard errors (at most 0.8% at 4,000
rounds), so a correct simulator fails one for a fraction below 1e-6 of the seeds.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saguaro_core.config import MODES, Mode
from saguaro_core.simulate_closed import fit_power_law, hit_rate_after, speed_model, stationary_hit_rate
from saguaro_core.simulate_events import SimEvent
from saguaro_core.simulate_model import Chances, Cost, Plan, Scenario, Times
from saguaro_core.simulate_run import simulate
from saguaro_core.theory import tokens_per_round

TOLERANCE = 0.04
LONG: dict[str, Any] = {"num_tokens": 12_000, "num_answers": 1}


def constant(ms: float) -> Cost:
    return Cost(((1, ms),))


def scenario(
    mode: Mode = "ssd",
    *,
    verify: float = 40.0,
    draft: float = 5.0,
    acceptance: float = 1.0,
    hit_rate: float | None = 1.0,
    fixed: dict[str, float] | None = None,
    **plan: Any,
) -> Scenario:
    """Constant times; by default everything is accepted and every outcome is prepared."""
    times = Times(verify=constant(verify), draft=constant(draft), **(fixed or {}))
    return Scenario(mode=mode, times=times, chances=Chances.alike(acceptance, hit_rate=hit_rate), plan=Plan(**plan))


# -- costs and settings ---------------------------------------------------------------------------------------------


def test_a_cost_follows_straight_lines_between_its_points() -> None:
    cost = Cost.parse("2:10,4:20,8:24")
    assert [cost.ms(rows) for rows in (1, 2, 3, 4, 6, 8, 12)] == [10, 10, 15, 20, 22, 24, 28]
    assert Cost.parse("18.3").ms(100) == 18.3


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0, 100)), min_size=1, max_size=5, unique_by=lambda p: p[0]))
def test_a_cost_passes_through_its_points_and_is_never_negative(points: list[tuple[int, float]]) -> None:
    cost = Cost(tuple(sorted(points)))
    assert all(cost.ms(rows) == pytest.approx(ms) for rows, ms in points)
    assert all(cost.ms(rows) >= 0.0 for rows in range(1, 200))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Cost.parse("4:10,2:20"), "rows rising"),
        (lambda: Cost.parse("fast"), "time 'fast': write milliseconds"),
        (lambda: Cost(((1, -1.0),)), "time of a forward is -1.0"),
        (lambda: Cost(()), "give pairs of rows and milliseconds"),
        (lambda: Times(verify=constant(1), draft=constant(1), link=-1.0), "link time is -1.0"),
        (lambda: Chances.alike(1.5), "acceptance after_hit is 1.5"),
        (lambda: Chances(after_hit=(), after_miss=(0.5,), sd=(0.5,)), "acceptance after_hit is empty"),
        (lambda: Chances.alike(0.5, hit_rate=2.0), "hit_rate is 2.0"),
        (lambda: Plan(batch_size=0), "batch_size is 0"),
        (lambda: Plan(fan_out="list", fan_out_list=(1, 2)), r"fan_out_list is \(1, 2\): give 4 counts"),
        (lambda: simulate(scenario(num_tokens=1)), "num_tokens is 1"),
    ],
)
def test_values_out_of_range_are_refused_by_name(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()


# -- timelines that can be computed by hand -------------------------------------------------------------------------


def test_autoregressive_decoding_is_one_verification_per_token() -> None:
    result = simulate(scenario("ar", fixed={"overhead": 10.0}, num_tokens=11, num_answers=2))
    assert (result.num_tokens, result.num_rounds) == (20, 20)
    assert result.tokens_per_second == pytest.approx(1000 / 50)
    assert result.wait_share == 0.0
    assert result.hit_rate is None


def test_speculative_decoding_waits_for_every_forward_of_the_draft() -> None:
    result = simulate(scenario("sd", num_tokens=40))
    assert result.mean_round_ms == pytest.approx(40 + 3 * 5)
    assert result.tokens_per_second == pytest.approx(1000 * 4 / 55)
    assert result.wait_share == pytest.approx(15 / 55)


def test_an_always_hitting_cache_hides_the_draft() -> None:
    result = simulate(scenario(num_tokens=40))
    assert result.mean_wait_ms == 0.0
    assert result.tokens_per_second == pytest.approx(1000 * 4 / 40)
    assert result.tokens_per_second_per_device == pytest.approx(1000 * 4 / 40 / 2)
    assert result.mean_build_ms == 20.0


def test_a_never_hitting_cache_is_speculative_decoding() -> None:
    both = [simulate(scenario(mode, hit_rate=0.0, num_tokens=40)).tokens_per_second for mode in ("sd", "ssd")]
    assert both[0] == pytest.approx(both[1])


def test_link_and_service_delay_a_hit_and_hide_behind_the_targets_own_work() -> None:
    fixed = {"link": 2.0, "serve": 1.0}
    assert simulate(scenario(fixed=fixed, num_tokens=40)).mean_wait_ms == pytest.approx(5.0)
    assert simulate(scenario(fixed={**fixed, "overhead": 3.0}, num_tokens=40)).mean_wait_ms == pytest.approx(2.0)
    hidden = simulate(scenario(fixed={**fixed, "overhead": 9.0}, num_tokens=40))
    assert (hidden.mean_wait_ms, hidden.mean_round_ms) == (0.0, 49.0)


def test_a_late_cache_is_waited_for() -> None:
    """A trunk forward and three branch forwards take 60 ms behind a verification of 40."""
    result = simulate(scenario(draft=15.0, early="wait", num_tokens=40))
    assert result.mean_round_ms == pytest.approx(60.0)
    assert result.tokens_per_round == pytest.approx(4.0)


def test_or_what_is_ready_of_it_is_served() -> None:
    """The verdict at 40 ms waits for the forward that ends at 45 ms; two tokens are ready then."""
    result = simulate(scenario(draft=15.0, early="ready", num_tokens=3001, num_answers=1))
    assert result.mean_round_ms == pytest.approx(45.0, rel=1e-3)
    assert result.tokens_per_round == pytest.approx(3.0, rel=1e-3)


def test_or_its_branch_alone_is_drafted_on() -> None:
    """One more forward of 15 ms for the third token."""
    result = simulate(scenario(draft=15.0, early="full", num_tokens=40))
    assert result.mean_round_ms == pytest.approx(60.0)
    assert result.tokens_per_round == pytest.approx(4.0)


def test_a_verdict_before_any_branch_has_a_token_is_a_miss() -> None:
    result = simulate(scenario(draft=100.0, num_tokens=40))
    assert result.hit_rate == 0.0
    assert result.mean_round_ms == pytest.approx(100.0 + 3 * 100.0)


def test_a_fast_backup_takes_no_time_and_may_be_a_plain_step() -> None:
    plain = simulate(scenario(hit_rate=0.0, backup="fast", backup_lookahead=0, num_tokens=40))
    assert (plain.tokens_per_round, plain.mean_wait_ms) == (1.0, 0.0)
    ngram = simulate(scenario(hit_rate=0.0, backup="fast", backup_lookahead=1, num_tokens=40))
    assert (ngram.tokens_per_round, ngram.mean_wait_ms) == (2.0, 0.0)


def test_draft_devices_share_the_branches_and_not_the_trunk() -> None:
    growing = Times(verify=constant(100.0), draft=Cost(((1, 1.0), (2, 2.0))))
    builds = [
        simulate(replace(scenario(budget=12, num_draft_devices=n, num_tokens=40), times=growing)).mean_build_ms
        for n in (1, 2, 5)
    ]
    assert builds == [1 + 3 * 12, 1 + 3 * 6, 1 + 3 * 3]


def test_the_last_round_does_not_pass_the_answers_end() -> None:
    """Four tokens a round and 10 to decode: the last round has two left, so it drafts one."""
    seen: list[SimEvent] = []
    simulate(scenario(num_tokens=10, num_answers=1), trace=seen.append)
    assert [e.what.partition(" rows")[0] for e in seen if e.what.startswith("verify")] == [
        "verify of 4",
        "verify of 4",
        "verify of 2",
    ]


def test_events_are_listed_in_the_order_in_which_they_happen() -> None:
    seen: list[SimEvent] = []
    simulate(scenario(num_tokens=8, num_answers=1, fixed={"link": 1.0}), trace=seen.append)
    assert all(a.time <= b.time for a, b in pairwise(seen))
    shown = [(e.time, e.place, e.what) for e in seen if e.round_index == 1]
    assert shown == [
        (57.0, "draft", "verdict received"),
        (57.0, "draft", "speculation sent"),
        (57.0, "draft", "trunk forward"),
        (58.0, "target", "verify of 4 rows begins after a wait of 2.00 ms"),
        (62.0, "draft", "branch forward 1"),
        (67.0, "draft", "branch forward 2"),
        (72.0, "draft", "branch forward 3"),
        (77.0, "draft", "build ends, 3 tokens deep"),
        (98.0, "target", "verdict on 1 sequences"),
    ]


def test_sequences_of_a_batch_leave_when_they_are_done() -> None:
    seen: list[SimEvent] = []
    result = simulate(scenario(acceptance=0.5, hit_rate=0.5, batch_size=3, num_tokens=30), trace=seen.append)
    sizes = {e.what for e in seen if e.what.startswith("verdict on")}
    assert sizes == {f"verdict on {n} sequences" for n in (1, 2, 3)}
    assert result.tokens_per_second_per_sequence == pytest.approx(result.tokens_per_second / 3)


# -- the closed forms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("acceptance", "hit_rate", "fixed"),
    [(0.5, 0.5, {}), (0.8, 0.9, {"overhead": 3.0}), (0.7, 0.3, {"link": 1.0, "serve": 2.0, "overhead": 2.0})],
)
def test_rounds_agree_with_theorem_7(acceptance: float, hit_rate: float, fixed: dict[str, float]) -> None:
    case = scenario(acceptance=acceptance, hit_rate=hit_rate, fixed=fixed, **LONG)
    for mode in MODES:
        here = replace(case, mode=mode)
        assert simulate(here, seed=3).tokens_per_second == pytest.approx(speed_model(here), rel=TOLERANCE)


def test_a_build_longer_than_a_verification_agrees_with_theorem_7_where_all_hit() -> None:
    case = scenario(draft=15.0, acceptance=0.6, early="wait", **LONG)
    assert simulate(case, seed=5).tokens_per_second == pytest.approx(speed_model(case), rel=TOLERANCE)


@pytest.mark.parametrize("backup", ["neural", "fast"])
def test_batches_agree_with_theorem_17(backup: str) -> None:
    case = scenario(
        acceptance=0.7, hit_rate=0.8, batch_size=4, num_tokens=6000, num_answers=1, backup=backup, backup_lookahead=2
    )
    assert simulate(case, seed=7).tokens_per_second == pytest.approx(speed_model(case), rel=TOLERANCE)


def test_the_comparison_with_the_closed_form_can_fail() -> None:
    """Negative control: a tenth more time per verification is seen."""
    case = scenario(acceptance=0.5, hit_rate=0.5, **LONG)
    slower = replace(case, times=replace(case.times, verify=constant(44.0)))
    assert simulate(case, seed=3).tokens_per_second != pytest.approx(speed_model(slower), rel=TOLERANCE)


def test_hits_follow_the_power_law_of_each_state() -> None:
    chances = Chances(after_hit=(0.8, 0.6), after_miss=(0.5,), sd=(0.6,), power_law_r=0.8)
    case = replace(scenario(num_tokens=30_000, num_answers=1), chances=chances)
    result = simulate(case, seed=11)
    assert result.hit_rate == pytest.approx(stationary_hit_rate(case), rel=TOLERANCE)
    assert result.tokens_after_hit == pytest.approx(tokens_per_round((0.8, 0.6), 3), rel=TOLERANCE)
    assert result.tokens_after_miss == pytest.approx(tokens_per_round((0.5,), 3), rel=TOLERANCE)


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
def test_after_full_acceptance_the_best_candidate_is_right_as_often_as_a_draft_token(acceptance: float) -> None:
    chances = Chances.alike(acceptance, power_law_r=0.1)
    assert chances.hit_chance(3, (0, 0, 0, 1), "hit") == pytest.approx(acceptance)
    assert chances.hit_chance(1, (0, 1, 0, 0), "hit") == pytest.approx(1 - 2**-0.1)


def test_a_certain_draft_always_hits_with_one_candidate() -> None:
    assert Chances.alike(1.0).hit_chance(3, (0, 0, 0, 1), "hit") == 1.0


@given(st.floats(0.05, 0.95), st.floats(0.1, 3.0), st.integers(1, 6), st.integers(1, 32))
def test_the_fitted_power_law_gives_the_hit_rate_back(acceptance: float, r: float, lookahead: int, budget: int) -> None:
    plan = Plan(lookahead=lookahead, budget=budget, fan_out="uniform")
    times = Times(verify=constant(1), draft=constant(1))
    chances = Chances.alike(acceptance, power_law_r=r)
    case = Scenario(mode="ssd", times=times, chances=chances, plan=plan)
    assert 0.0 <= hit_rate_after(case, "hit") <= 1.0
    fitted = fit_power_law(case, stationary_hit_rate(case))
    assert stationary_hit_rate(fitted) == pytest.approx(stationary_hit_rate(case), abs=1e-6)


# -- invariants -----------------------------------------------------------------------------------------------------

TIMES = st.builds(
    Times,
    verify=st.floats(1, 50).map(constant),
    draft=st.tuples(st.floats(0.1, 20), st.floats(0, 20)).map(lambda t: Cost(((1, t[0]), (12, t[0] + t[1])))),
    serve=st.floats(0, 3),
    plant=st.floats(0, 3),
    overhead=st.floats(0, 5),
    link=st.floats(0, 5),
)
SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=3).map(tuple)
CHANCES = st.builds(
    Chances,
    after_hit=SHARES,
    after_miss=SHARES,
    sd=SHARES,
    power_law_r=st.floats(0.05, 4),
    hit_rate=st.none() | st.floats(0, 1),
)
PLANS = st.builds(
    Plan,
    lookahead=st.integers(1, 5),
    budget=st.integers(1, 12),
    fan_out=st.sampled_from(["geometric", "uniform"]),
    backup=st.sampled_from(["neural", "fast"]),
    backup_lookahead=st.none() | st.integers(0, 5),
    early=st.sampled_from(["ready", "full", "wait"]),
    batch_size=st.integers(1, 3),
    num_tokens=st.integers(8, 20),
    num_answers=st.integers(1, 2),
    num_draft_devices=st.integers(1, 3),
)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.sampled_from(MODES), TIMES, CHANCES, PLANS, st.integers(0, 2**32))
def test_whatever_the_inputs_the_books_balance(
    mode: Mode, times: Times, chances: Chances, plan: Plan, seed: int
) -> None:
    case = Scenario(mode=mode, times=times, chances=chances, plan=plan)
    seen: list[SimEvent] = []
    result = simulate(case, seed=seed, trace=seen.append)
    assert result == simulate(case, seed=seed)
    assert all(a.time <= b.time for a, b in pairwise(seen))
    longest = 1 + max(plan.lookahead, plan.backup_tokens)
    assert 1.0 <= result.tokens_per_round <= longest
    assert result.num_tokens <= plan.batch_size * plan.num_answers * (plan.num_tokens - 1)
    assert result.num_tokens >= plan.batch_size * plan.num_answers * (plan.num_tokens - longest)
    assert 0.0 <= result.wait_share < 1.0
    assert result.mean_round_ms >= times.verify.ms(1) + result.mean_wait_ms - 1e-9
    assert result.hit_rate is None or 0.0 <= result.hit_rate <= 1.0
