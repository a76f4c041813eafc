"""The benchmark of batches: figures of rounds that are written down, b* measured and predicted, and the command."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_bench import Outcome, ScriptedEngine, command_line

from saguaro_core.bench_batch_report import BatchReport, BatchRun, Column, ObservedRow, summarise_batches
from saguaro_core.bench_batch_table import format_batches
from saguaro_core.config import Mode
from saguaro_core.events import CacheOutcome, RoundEvent, RunFinished
from saguaro_core.run_figures import RunFigures
from saguaro_core.theory import Backup, critical_batch_size, ssd_speed

HIT: CacheOutcome = "hit"
MISS: CacheOutcome = "miss"
FIRST: CacheOutcome = "compulsory"


def row(
    lengths: Sequence[int], caches: Sequence[CacheOutcome | None], round_seconds: float, draft_ms: float
) -> ObservedRow:
    """A sequence that commits so many tokens in rounds of equal length, of which verification is half."""
    observed = ObservedRow()
    for index, (length, cache) in enumerate(zip(lengths, caches, strict=True)):
        observed.take(
            RoundEvent(
                run_id="x",
                index=index,
                drafted=length,
                accepted=length - 1,
                bonus_token_id=0,
                start=index * round_seconds,
                verify_ms=round_seconds * 500,
                draft_ms=draft_ms if cache == MISS else 0.0,
                wait_ms=draft_ms if cache == MISS else 0.0,
                cache=cache,
                num_committed=length,
            )
        )
    observed.take(
        RunFinished(
            run_id="x",
            status="finished",
            stop_reason="length",
            time=1.0,
            text="",
            token_ids=(1, 2, 3),
            figures=RunFigures(mean_build_ms=10.0),
        )
    )
    return observed


def batch(column: Column, size: int, rows: Sequence[ObservedRow], group: int = 0) -> BatchRun:
    return BatchRun(column=column, size=size, group=group, rows=tuple(rows))


def report(fast_seconds: float = 0.2) -> BatchReport:
    """Two sequences together; in SSD one hits twice, the other hits once and misses once."""
    none: list[CacheOutcome | None] = [None] * 3
    hits: list[CacheOutcome | None] = [FIRST, HIT, HIT]
    mixed: list[CacheOutcome | None] = [FIRST, HIT, MISS]
    return summarise_batches(
        [
            batch("ar", 2, [row([1, 1, 1], none, 0.1, 0), row([1, 1, 1, 1], [None] * 4, 0.1, 0)]),
            batch("sd", 2, [row([2, 2, 2], none, 0.2, 0)] * 2),
            batch("ssd_neural", 2, [row([2, 3, 3], hits, 0.25, 20), row([2, 3, 2], mixed, 0.25, 20)]),
            batch("ssd_fast", 2, [row([2, 3, 3], hits, fast_seconds, 1), row([2, 3, 1], mixed, fast_seconds, 1)]),
        ]
    )


class TestFigures:
    def test_speed_counts_the_rounds_that_all_sequences_had_after_the_first(self) -> None:
        columns = report().sizes[0].columns
        assert columns["ar"].tokens_per_second == pytest.approx(4 / 0.2)
        assert columns["ar"].tokens_per_second_each == pytest.approx(2 / 0.2)
        assert columns["ssd_neural"].tokens_per_second == pytest.approx(11 / 0.5)
        assert columns["ssd_neural"].round_ms == pytest.approx(250)

    def test_hits_waits_and_backups(self) -> None:
        neural = report().sizes[0].columns["ssd_neural"]
        assert (neural.cache_hit_rate, neural.all_hit_rate) == (0.75, 0.5)
        assert neural.predicted_all_hit_rate == pytest.approx(0.75**2)
        assert (neural.tokens_after_hit, neural.tokens_after_miss) == (3.0, 2.0)
        assert (neural.fallback_ms, neural.build_ms) == (20.0, 10.0)
        assert neural.wait_ms == pytest.approx((0 + 20) / 2)  # The round waits for its slowest.

    def test_ratios_are_of_paired_batches(self) -> None:
        ratios = report().sizes[0].ratios
        assert ratios["sd_over_ar"] == pytest.approx((8 / 0.4) / (4 / 0.2))
        assert ratios["ssd_fast_over_ssd_neural"] == pytest.approx((10 / 0.4) / (11 / 0.5))

    def test_predictions_are_theorem_17s(self) -> None:
        done = report()
        verify = 125.0
        neural, fast = Backup(tokens_per_round=2.0, time=20 / verify), Backup(tokens_per_round=1.0, time=1 / verify)
        speeds = [ssd_speed(0.75, 3.0, backup, 10 / verify, batch_size=2) for backup in (fast, neural)]
        assert done.sizes[0].predicted_fast_over_neural == pytest.approx(speeds[0] / speeds[1])
        assert done.predicted_critical_batch == critical_batch_size(0.75, 3.0, neural, fast, 10 / verify)

    @pytest.mark.parametrize(("seconds", "measured"), [(0.2, 2), (0.3, None)])
    def test_b_star_is_the_smallest_batch_at_which_fast_wins(self, seconds: float, measured: int | None) -> None:
        done = report(seconds)
        assert done.measured_critical_batch == measured
        shown = "the fast fallback never wins" if measured is None else "2"
        assert f"b*, measured among 2: {shown}\n" in format_batches(done)

    def test_answers_that_differ_are_said(self) -> None:
        assert report().same_tokens
        odd = row([1], [None], 0.1, 0)
        assert odd.finished is not None
        odd.finished = replace(odd.finished, token_ids=(9,))
        columns: tuple[Column, ...] = ("ar", "sd", "ssd_neural", "ssd_fast")
        runs = [batch(column, 1, [odd if column == "sd" else row([1], [None], 0.1, 0)]) for column in columns]
        done = summarise_batches(runs)
        assert not done.same_tokens
        assert "same tokens: no" in format_batches(done)
        # Nothing can be timed in a single round.
        assert done.sizes[0].columns["ar"].tokens_per_second is None
        assert done.sizes[0].ratios["sd_over_ar"] is None


class TestCommand:
    @pytest.fixture
    def call(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
        return command_line(tmp_path, capsys)

    def test_every_size_runs_in_every_column_on_the_same_prompts(self, call: Callable[..., Outcome]) -> None:
        engine = ScriptedEngine()
        outcome = call(engine, "--batch", "1,3", "--prompts", "3", "--max-new-tokens", "8")
        assert outcome.status == 0
        warm_ups, requests = engine.requests[:4], engine.requests[4:]
        assert len(requests) == 4 * 3 + 4 * 3
        modes: list[Mode] = ["ar", "sd", "ssd", "ssd"]
        assert [request.mode for request in warm_ups] == modes
        assert {request.speculation.fallback for request in requests} == {"neural", "fast"}
        assert [entry["size"] for entry in outcome.data["batches"]] == [1, 3]
        assert set(outcome.data["critical_batch_size"]) == {"measured", "predicted"}
        assert outcome.data["same_tokens"] is True
        assert outcome.out.splitlines()[1].split()[:2] == ["1", "AR"]

    @pytest.mark.parametrize("sizes", ["", "0", "17", "2,2", "two", "1;2", "-1"])
    def test_sizes_that_cannot_be_are_refused(self, call: Callable[..., Outcome], sizes: str) -> None:
        outcome = call(ScriptedEngine(), f"--batch={sizes}")
        assert outcome.status == 2
        assert f"batch is {sizes!r}: give sizes from 1 to 16" in outcome.err

    def test_a_sequence_that_fails_ends_the_command_with_its_reason(self, call: Callable[..., Outcome]) -> None:
        outcome = call(ScriptedEngine(fail_on="sd"), "--batch", "2", "--prompts", "2", "--max-new-tokens", "4")
        assert outcome.status == 1
        assert "in sd did not finish: the script says so" in outcome.err

    def test_it_is_one_thing_at_a_time(self, call: Callable[..., Outcome]) -> None:
        outcome = call(ScriptedEngine(), "--batch", "2", "--memory")
        assert outcome.status == 2
        assert "are both given: ask for one at a time" in outcome.err
