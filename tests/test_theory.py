"""The speed model against closed forms, brute force and a Monte-Carlo clock."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saguaro_core.run_figures import RunFigures
from saguaro_core.theory import (
    Backup,
    PredictedSpeed,
    acceptance_for,
    critical_batch_size,
    expected_tokens,
    predict,
    sd_speed,
    ssd_speed,
    tokens_per_round,
)

NEURAL = Backup(tokens_per_round=3.0, time=0.3)
FAST = Backup(tokens_per_round=1.3, time=0.0)


@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("lookahead", [0, 1, 3, 16])
def test_expected_tokens_is_the_geometric_sum(acceptance: float, lookahead: int) -> None:
    closed = (1 - acceptance ** (lookahead + 1)) / (1 - acceptance)
    assert expected_tokens(acceptance, lookahead) == pytest.approx(closed)


def test_expected_tokens_at_the_ends() -> None:
    assert expected_tokens(1.0, 7) == 8.0
    assert expected_tokens(0.0, 7) == 1.0


@given(st.floats(0.0, 1.0), st.integers(1, 16))
def test_the_acceptance_is_found_again_from_the_tokens_per_round(acceptance: float, lookahead: int) -> None:
    tokens = expected_tokens(acceptance, lookahead)
    assert expected_tokens(acceptance_for(tokens, lookahead), lookahead) == pytest.approx(tokens)
    assert acceptance_for(lookahead + 2.0, lookahead) == pytest.approx(1.0)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4), st.integers(0, 8))
def test_acceptance_by_position_repeats_its_last_entry(acceptance: list[float], lookahead: int) -> None:
    survives = [math.prod([*acceptance, *[acceptance[-1]] * 8][: k + 1]) for k in range(lookahead)]
    assert tokens_per_round(acceptance, lookahead) == pytest.approx(1.0 + sum(survives))
    assert tokens_per_round(acceptance[:1], lookahead) == pytest.approx(expected_tokens(acceptance[0], lookahead))


def test_speculative_decoding_pays_for_every_draft() -> None:
    assert sd_speed(3.0, 0.0) == 3.0
    assert sd_speed(3.0, 0.5) == 2.0


def test_always_hitting_hides_a_build_that_fits_behind_a_verification() -> None:
    assert ssd_speed(1.0, 4.0, NEURAL, 0.9) == 4.0
    assert ssd_speed(1.0, 4.0, NEURAL, 2.0) == 2.0


def test_never_hitting_is_speculative_decoding_with_the_backup() -> None:
    assert ssd_speed(0.0, 4.0, NEURAL, 0.5) == pytest.approx(sd_speed(3.0, 0.3))


def test_a_batch_waits_for_any_miss() -> None:
    one, many = (ssd_speed(0.8, 4.0, NEURAL, 1.0, batch_size=b) for b in (1, 100))
    assert one == pytest.approx((0.8 * 4 + 0.2 * 3) / (0.8 + 0.2 * 1.3))
    assert many == pytest.approx((0.8 * 4 + 0.2 * 3) / 1.3, rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_speed_agrees_with_a_clock_that_throws_the_dice(batch_size: int) -> None:
    """Token and time sums over 40,000 rounds; the mean is within 1% (over 6 standard errors)."""
    random, hit_rate, build_time = Random(7), 0.7, 1.2
    tokens = time = 0.0
    for _ in range(40_000):
        hits = [random.random() < hit_rate for _ in range(batch_size)]
        tokens += sum(4.0 if hit else NEURAL.tokens_per_round for hit in hits)
        time += build_time if all(hits) else 1.0 + NEURAL.time
    expected = ssd_speed(hit_rate, 4.0, NEURAL, build_time, batch_size=batch_size)
    assert tokens / batch_size / time == pytest.approx(expected, rel=0.01)


def test_expected_tokens_agrees_with_thrown_dice() -> None:
    """40,000 rounds; standard error 0.007, so 0.05 is 7 of them."""
    random, acceptance, lookahead = Random(11), 0.7, 5

    def round_tokens() -> int:
        rejected_at = (k for k in range(lookahead) if random.random() >= acceptance)
        return next(rejected_at, lookahead) + 1

    mean = sum(round_tokens() for _ in range(40_000)) / 40_000
    assert mean == pytest.approx(expected_tokens(acceptance, lookahead), abs=0.05)


def test_a_larger_batch_makes_the_fast_backup_win() -> None:
    b_star = critical_batch_size(0.9, 4.0, NEURAL, FAST, 1.0)
    assert b_star is not None
    assert b_star > 1
    for batch_size, winner in ((b_star - 1, NEURAL), (b_star, FAST), (10 * b_star, FAST)):
        loser = FAST if winner is NEURAL else NEURAL
        speeds = [ssd_speed(0.9, 4.0, backup, 1.0, batch_size=batch_size) for backup in (winner, loser)]
        assert speeds[0] > speeds[1]


def test_a_neural_backup_that_costs_nothing_is_never_beaten() -> None:
    assert critical_batch_size(0.9, 4.0, Backup(tokens_per_round=3.0, time=0.0), FAST, 1.0) is None


def test_a_fast_backup_that_is_as_good_wins_at_once() -> None:
    assert critical_batch_size(0.9, 4.0, NEURAL, Backup(tokens_per_round=3.0, time=0.0), 1.0) == 1


@pytest.mark.parametrize(("hit_rate", "expected"), [(1.0, None), (0.0, None)])
def test_without_chance_the_batch_size_does_not_matter(hit_rate: float, expected: int | None) -> None:
    poor = Backup(tokens_per_round=1.0, time=0.0)
    assert critical_batch_size(hit_rate, 4.0, NEURAL, poor, 1.0) == expected


def test_a_rare_miss_of_small_cost_needs_a_large_batch() -> None:
    """E is 4 with neural and 4 - 2.7e-4 with fast; 1 - p^b must exceed (4 / (4 - 2.7e-4) - 1) / 1e-3 = 0.0675."""
    costly = Backup(tokens_per_round=4.0, time=1e-3)
    expected = math.ceil(math.log(1 - 0.067505) / math.log(0.9999))
    assert critical_batch_size(0.9999, 4.0, costly, FAST, 1.0) == expected == 699


BACKUPS = st.builds(Backup, tokens_per_round=st.floats(1.0, 6.0), time=st.floats(0.0, 3.0))


@given(st.floats(0.05, 0.95), st.floats(1.0, 8.0), BACKUPS, BACKUPS, st.floats(0.0, 2.0))
def test_critical_batch_size_is_the_smallest(
    hit_rate: float, tokens: float, neural: Backup, fast: Backup, build_time: float
) -> None:
    def gain(batch_size: int) -> float:
        speeds = [ssd_speed(hit_rate, tokens, b, build_time, batch_size=batch_size) for b in (fast, neural)]
        return speeds[0] - speeds[1]

    b_star = critical_batch_size(hit_rate, tokens, neural, fast, build_time)
    searched = range(1, 200 if b_star is None else b_star)
    assert all(gain(b) <= 1e-12 for b in searched)
    assert b_star is None or gain(b_star) > 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expected_tokens(1.5, 3), "acceptance is 1.5"),
        (lambda: expected_tokens(math.nan, 3), "acceptance is nan"),
        (lambda: expected_tokens(0.5, -1), "lookahead is -1"),
        (lambda: sd_speed(0.5, 0.0), "tokens_per_round is 0.5"),
        (lambda: sd_speed(1.0, -0.1), "draft_time is -0.1"),
        (lambda: ssd_speed(-0.1, 1.0, NEURAL, 0.0), "hit_rate is -0.1"),
        (lambda: ssd_speed(0.5, 1.0, NEURAL, math.inf), "build_time is inf"),
        (lambda: ssd_speed(0.5, 1.0, NEURAL, 0.0, batch_size=0), "batch_size is 0"),
        (lambda: Backup(tokens_per_round=0.0, time=0.0), "tokens_per_round of a backup is 0.0"),
        (lambda: Backup(tokens_per_round=1.0, time=-1.0), "time of a backup is -1.0"),
    ],
)
def test_values_out_of_range_are_refused_by_name(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()


AR = RunFigures(mean_verify_ms=20.0)
SD = RunFigures(
    mean_verify_ms=25.0, mean_step_ms=5.0, num_draft_tokens=50, num_spec_steps=20, mean_acceptance_length=3.0
)
SSD = RunFigures(
    mean_verify_ms=25.0,
    mean_build_ms=20.0,
    mean_fallback_ms=10.0,
    mean_acceptance_length=2.9,
    cache_hit_rate=0.8,
    mean_acceptance_length_hit=3.0,
    mean_acceptance_length_miss=2.5,
)


def test_prediction_from_paired_runs() -> None:
    predicted = predict(SSD, ar=AR, sd=SD)
    sd = 3.0 / 1.5 / 25
    ssd = (0.8 * 3 + 0.2 * 2.5) / (0.8 + 0.2 * 1.4) / 25
    assert predicted.sd_over_ar == pytest.approx(sd * 20)
    assert predicted.ssd_over_ar == pytest.approx(ssd * 20)
    assert predicted.ssd_over_sd == pytest.approx(ssd / sd)


def test_prediction_from_one_run_takes_the_backup_as_draft_and_the_verification_as_decode() -> None:
    predicted = predict(SSD)
    assert predicted.sd_over_ar == pytest.approx(2.9 / 1.4)
    assert predicted.ssd_over_ar == pytest.approx((0.8 * 3 + 0.2 * 2.5) / (0.8 + 0.2 * 1.4))


def test_a_run_of_speculative_decoding_predicts_itself_only() -> None:
    predicted = predict(SD, ar=AR)
    assert predicted.sd_over_ar == pytest.approx(3.0 / 1.5 / 25 * 20)
    assert predicted == PredictedSpeed(sd_over_ar=predicted.sd_over_ar)


def test_a_plain_or_empty_run_predicts_nothing() -> None:
    assert predict(AR, ar=AR) == PredictedSpeed()
    assert predict(RunFigures()) == PredictedSpeed()


def test_a_run_without_misses_needs_no_backup_figures() -> None:
    figures = replace(SSD, cache_hit_rate=1.0, mean_acceptance_length_miss=None, mean_fallback_ms=None)
    assert predict(figures).ssd_over_ar == pytest.approx(3.0)
    assert predict(figures).sd_over_ar is None


def test_work_beside_the_verification_slows_every_round() -> None:
    """1 ms in AR's rounds, 3 ms in those of SSD; waits are not work."""
    ar = replace(AR, mean_round_ms=21.0)
    ssd = replace(SSD, mean_round_ms=30.0, mean_wait_ms=2.0)
    expected = (0.8 * 3 + 0.2 * 2.5) / (0.8 + 0.2 * (1 + 10 / 28)) / 28 * 21
    assert predict(ssd, ar=ar).ssd_over_ar == pytest.approx(expected)


def test_rounds_shorter_than_their_verification_are_not_believed() -> None:
    assert predict(replace(SSD, mean_round_ms=1.0), ar=AR) == predict(SSD, ar=AR)
