"""Figures of a run: what counts as accepted, what is undefined, and what the clock divides by."""

import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saguaro_core.config import Mode
from saguaro_core.events import CacheOutcome, Event, Lane, RoundEvent, SpanEvent, SpanKind, TokenEvent
from saguaro_core.figures import FiguresAccumulator, RunFigures

HIT_OR_MISS: tuple[CacheOutcome, ...] = ("hit", "miss")


def make_round(
    index: int,
    drafted: int,
    accepted: int,
    committed: int | None = None,
    cache: CacheOutcome | None = None,
) -> RoundEvent:
    return RoundEvent(
        run_id="r",
        index=index,
        drafted=drafted,
        accepted=accepted,
        bonus_token_id=0,
        start=float(index),
        verify_ms=10.0 + index,
        draft_ms=0.0,
        wait_ms=2.0,
        cache=cache,
        num_committed=accepted + 1 if committed is None else committed,
    )


def make_token(index: int, time: float) -> TokenEvent:
    return TokenEvent(
        run_id="r", index=index, token_id=index, text="", time=time, round_index=0, place=0, origin="target"
    )


def make_span(lane: Lane, kind: SpanKind, start: float, end: float, round_index: int | None = None) -> SpanEvent:
    return SpanEvent(run_id="r", lane=lane, kind=kind, start=start, end=end, round_index=round_index)


def figures_of(events: Iterable[Event], mode: Mode = "ssd", num_devices: int = 2, elapsed: float = 1.0) -> RunFigures:
    accumulator = FiguresAccumulator(mode, num_devices)
    for event in events:
        accumulator.add(event)
    return accumulator.figures(elapsed)


def tokens_of(rounds: Sequence[RoundEvent]) -> list[TokenEvent]:
    times = [r.start + r.verify_ms / 1000 for r in rounds for _ in range(r.num_committed)]
    return [make_token(index, time) for index, time in enumerate(times)]


def num_leading_matches(pattern: Sequence[int]) -> int:
    return [*pattern, 0].index(0)


def test_matches_after_the_first_rejection_do_not_count() -> None:
    pattern = [1, 0, 1, 1]
    figures = figures_of([make_round(0, len(pattern), num_leading_matches(pattern))])
    assert (figures.num_accepted_draft_tokens, figures.num_draft_tokens) == (1, 4)
    assert figures.draft_acceptance_rate == 0.25
    assert figures.mean_acceptance_length == 2.0
    assert figures.acceptance_histogram == (0, 1, 0, 0, 0)


def test_no_rounds_leave_every_rate_undefined() -> None:
    figures = figures_of([], elapsed=0.5)
    assert figures == RunFigures(elapsed=0.5, num_devices=2)
    assert figures.draft_acceptance_rate is None
    assert figures.decode_tokens_per_second is None


def test_autoregressive_rounds_are_not_speculation_steps() -> None:
    rounds = [make_round(i, 0, 0) for i in range(3)]
    figures = figures_of([*rounds, *tokens_of(rounds)], mode="ar")
    assert figures.num_spec_steps == 0
    assert figures.draft_acceptance_rate is None
    assert figures.mean_acceptance_length is None
    assert figures.acceptance_histogram == ()
    assert figures.mean_wait_ms is None
    assert figures.mean_verify_ms == 11.0
    assert figures.num_devices == 1


def test_cap_of_one_has_no_decode_speed() -> None:
    round_ = make_round(0, 0, 0)
    figures = figures_of([round_, *tokens_of([round_])])
    assert figures.num_tokens == 1
    assert figures.time_to_first_token == pytest.approx(0.010)
    assert figures.decode_tokens_per_second is None
    assert figures.tokens_per_second_per_device is None
    assert figures.draft_acceptance_rate is None


def test_end_of_turn_inside_the_first_block_leaves_out_what_lies_behind_it() -> None:
    round_ = make_round(0, 5, 5, committed=3, cache="compulsory")
    figures = figures_of([round_, *tokens_of([round_])])
    assert figures.num_tokens == 3
    assert (figures.num_accepted_draft_tokens, figures.num_draft_tokens) == (3, 3)
    assert figures.draft_acceptance_rate == 1.0
    assert figures.decode_tokens_per_second is None


def test_end_of_turn_as_bonus_token_cuts_nothing() -> None:
    figures = figures_of([make_round(0, 5, 3, committed=4)])
    assert (figures.num_accepted_draft_tokens, figures.num_draft_tokens) == (3, 5)


@pytest.mark.parametrize(("drafted", "accepted"), [(1, 1), (1, 0), (7, 7)])
def test_lookahead_seven_with_cap_two_never_counts_more_than_was_shown(drafted: int, accepted: int) -> None:
    round_ = make_round(0, drafted, accepted, committed=min(accepted + 1, 2))
    figures = figures_of([round_, *tokens_of([round_])])
    assert figures.num_accepted_draft_tokens <= figures.num_tokens <= 2


def test_speed_leaves_the_whole_first_block_out() -> None:
    tokens = [make_token(i, t) for i, t in enumerate([1.0, 1.0, 1.0, 1.5, 1.5, 2.0])]
    figures = figures_of(tokens, mode="ssd", num_devices=2)
    assert figures.time_to_first_token == 1.0
    assert figures.decode_tokens_per_second == 3.0
    assert figures.tokens_per_second_per_device == 1.5


@pytest.mark.parametrize(("mode", "devices"), [("ar", 1), ("sd", 1), ("ssd", 2)])
def test_only_ssd_keeps_more_than_one_device_busy(mode: Mode, devices: int) -> None:
    tokens = [make_token(0, 1.0), make_token(1, 2.0)]
    figures = figures_of(tokens, mode=mode, num_devices=2)
    assert figures.num_devices == devices
    assert figures.tokens_per_second_per_device == 1.0 / devices


def test_the_compulsory_miss_is_left_out_of_the_hit_rate() -> None:
    rounds = [
        make_round(0, 3, 0, cache="compulsory"),
        make_round(1, 3, 3, cache="hit"),
        make_round(2, 3, 2, cache="hit"),
        make_round(3, 0, 0, cache="miss"),
    ]
    figures = figures_of(rounds)
    assert (figures.num_cache_hits, figures.num_cache_misses) == (2, 1)
    assert figures.cache_hit_rate == pytest.approx(2 / 3)
    assert figures.mean_acceptance_length_hit == 3.5
    assert figures.mean_acceptance_length_miss == 1.0
    assert figures.num_spec_steps == 3


def test_hit_rate_is_undefined_after_the_first_round_only() -> None:
    assert figures_of([make_round(0, 3, 1, cache="compulsory")]).cache_hit_rate is None


def test_pieces_of_one_build_are_one_build() -> None:
    spans = [
        make_span("draft", "build", 0.0, 0.010, 4),
        make_span("draft", "build", 0.020, 0.030, 4),
        make_span("draft", "build", 0.040, 0.060, 5),
        make_span("draft", "fallback", 0.060, 0.063, 5),
        make_span("target", "build", 0.0, 9.0, 7),
    ]
    figures = figures_of(spans)
    assert figures.mean_build_ms == pytest.approx(20.0)
    assert figures.mean_fallback_ms == pytest.approx(3.0)
    assert figures.mean_step_ms is None


def test_a_step_is_one_forward_of_the_draft() -> None:
    spans = [make_span("draft", "step", 0.0, 0.004, 1), make_span("draft", "step", 0.004, 0.010, 1)]
    assert figures_of(spans, mode="sd").mean_step_ms == pytest.approx(5.0)


def test_overlap_is_the_share_of_build_time_inside_verifications() -> None:
    spans = [
        make_span("draft", "build", 5.0, 15.0),
        make_span("target", "verify", 0.0, 10.0),
        make_span("target", "verify", 14.0, 20.0),
        make_span("target", "wait", 10.0, 14.0),
        make_span("draft", "build", 20.0, 22.0),
    ]
    assert figures_of(spans).build_overlap == pytest.approx((5 + 1) / 12)


def test_overlap_is_undefined_without_a_build() -> None:
    assert figures_of([make_span("target", "verify", 0.0, 1.0)]).build_overlap is None


def test_round_mean_times() -> None:
    figures = figures_of([make_round(0, 1, 1), make_round(1, 1, 1)], mode="sd")
    assert figures.mean_verify_ms == 10.5
    assert figures.mean_wait_ms == 2.0


def test_device_count_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="num_devices is 0"):
        FiguresAccumulator("ssd", 0)


def test_figures_need_no_torch() -> None:
    code = "import sys, saguaro_core.figures; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@st.composite
def disjoint_spans(draw: st.DrawFn, lane: Lane, kind: SpanKind) -> list[SpanEvent]:
    edges = sorted(draw(st.sets(st.integers(0, 200), max_size=20)))
    pairs = zip(edges[::2], edges[1::2], strict=False)
    return [make_span(lane, kind, float(a), float(b), index) for index, (a, b) in enumerate(pairs)]


@given(disjoint_spans("draft", "build"), disjoint_spans("target", "verify"), st.randoms(use_true_random=False))
def test_overlap_equals_the_brute_force_share_in_any_order(
    builds: list[SpanEvent], verifies: list[SpanEvent], random: Random
) -> None:
    events = [*builds, *verifies]
    random.shuffle(events)
    verify_ticks = {t for s in verifies for t in range(int(s.start), int(s.end))}
    build_ticks = [t for s in builds for t in range(int(s.start), int(s.end))]
    expected = sum(t in verify_ticks for t in build_ticks) / len(build_ticks) if build_ticks else None
    assert figures_of(events).build_overlap == (None if expected is None else pytest.approx(expected))


@st.composite
def speculative_rounds(draw: st.DrawFn) -> list[RoundEvent]:
    """Rounds as a run makes them: the first is compulsory, only the last may be cut."""
    rounds: list[RoundEvent] = []
    for index in range(draw(st.integers(0, 12))):
        drafted = draw(st.integers(0, 16))
        cache: CacheOutcome = "compulsory" if index == 0 else draw(st.sampled_from(HIT_OR_MISS))
        rounds.append(make_round(index, drafted, draw(st.integers(0, drafted)), cache=cache))
    if rounds:
        rounds[-1] = replace(rounds[-1], num_committed=draw(st.integers(1, rounds[-1].accepted + 1)))
    return rounds


@given(speculative_rounds())
def test_invariants_of_any_run(rounds: list[RoundEvent]) -> None:
    figures = figures_of([*rounds, *tokens_of(rounds)], elapsed=99.0)
    assert figures.num_tokens == sum(r.num_committed for r in rounds)
    assert figures.num_accepted_draft_tokens <= figures.num_draft_tokens
    assert figures.num_accepted_draft_tokens <= figures.num_tokens
    assert sum(figures.acceptance_histogram) == figures.num_spec_steps == sum(r.drafted > 0 for r in rounds)
    accepted = sum(k * count for k, count in enumerate(figures.acceptance_histogram))
    assert accepted == figures.num_accepted_draft_tokens
    assert figures.num_cache_hits + figures.num_cache_misses == max(0, len(rounds) - 1)
    for rate in (figures.draft_acceptance_rate, figures.cache_hit_rate):
        assert rate is None or 0.0 <= rate <= 1.0
    assert (figures.draft_acceptance_rate is None) == (figures.num_draft_tokens == 0)
    assert figures.decode_tokens_per_second is None or figures.decode_tokens_per_second > 0
    assert (figures.decode_tokens_per_second is None) == (len(rounds) < 2)


@given(speculative_rounds(), st.integers(0, 12))
def test_asking_midway_changes_nothing(rounds: list[RoundEvent], when: int) -> None:
    accumulator = FiguresAccumulator("ssd", 2)
    for index, event in enumerate(rounds):
        accumulator.add(event)
        if index == when:
            accumulator.figures(0.0)
    assert accumulator.figures(1.0) == figures_of(rounds)


def test_the_mean_round_is_the_time_between_commits() -> None:
    figures = figures_of([make_round(index, 3, 1) for index in range(3)])
    assert figures.num_rounds == 3
    assert figures.mean_round_ms == pytest.approx((2000 + 12 - 10) / 2)
    assert figures_of([make_round(0, 3, 1)]).mean_round_ms is None
