"""What the benchmark measures, over a scripted engine: which runs, how figures are reduced, and what is said."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_bench import INFO, PACE, SPEED, Outcome, ScriptedEngine, command_line

from saguaro_core.bench_measure import Measurement
from saguaro_core.bench_report import summarise_column
from saguaro_core.config import GenerationRequest, Mode, Placement
from saguaro_core.events import RunFinished
from saguaro_core.prompts import PROMPTS, WARM_UP
from saguaro_core.run_figures import RunFigures


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    return command_line(tmp_path, capsys)


def row(text: str, label: str) -> list[str]:
    """The cells of one line of the table."""
    line = next(line for line in text.splitlines() if line.startswith(label))
    return line.removeprefix(label).split()


def modes_and_prompts(requests: Sequence[GenerationRequest]) -> list[tuple[Mode, str]]:
    return [(request.mode, request.messages[0].content) for request in requests]


def test_every_prompt_runs_in_all_modes_in_turn_after_one_warm_up_each(bench: Callable[..., Outcome]) -> None:
    engine = ScriptedEngine()
    outcome = bench(engine, "--prompts", "2", "--max-new-tokens", "5")
    assert outcome.status == 0
    texts = [WARM_UP.text, PROMPTS[0].text, PROMPTS[1].text]
    expected = [(mode, text) for text in texts for mode in ("ar", "sd", "ssd")]
    assert modes_and_prompts(engine.requests) == expected
    assert len(outcome.data["runs"]) == 6
    assert engine.is_closed


def test_repeats_run_the_whole_plan_again(bench: Callable[..., Outcome]) -> None:
    engine = ScriptedEngine()
    outcome = bench(engine, "--prompts", "2", "--max-new-tokens", "5", "--modes", "ar,ssd", "--repeats", "3")
    assert len(engine.requests) == 2 + 2 * 2 * 3
    assert [run["repeat"] for run in outcome.data["runs"]] == [0] * 4 + [1] * 4 + [2] * 4
    assert outcome.data["modes"]["ar"]["num_runs"] == 6


def test_json_has_the_documented_keys_and_figures(bench: Callable[..., Outcome]) -> None:
    data = bench(ScriptedEngine(), "--prompts", "3", "--max-new-tokens", "21").data
    assert set(data["modes"]) == {"ar", "sd", "ssd"}
    for mode, speed in SPEED.items():
        assert data["modes"][mode]["decode_tokens_per_second"] == pytest.approx(speed, rel=0.08)
    ratios = data["ratios"]
    assert set(ratios) == {"ssd_over_ar", "ssd_over_sd", "sd_over_ar"}
    assert ratios["ssd_over_sd"] == pytest.approx(2.0)
    assert ratios["ssd_over_ar"] == pytest.approx(ratios["ssd_over_sd"] * ratios["sd_over_ar"])
    assert data["same_tokens"] is True
    assert data["differences"] == data["notes"] == []
    assert data["hardware"] == INFO.hardware
    assert data["settings"]["sampling"]["max_new_tokens"] == 21
    assert data["runs"][0]["figures"]["num_tokens"] == 21


def test_prediction_agrees_with_a_run_that_follows_the_model(bench: Callable[..., Outcome]) -> None:
    data = bench(ScriptedEngine(), "--prompts", "1", "--max-new-tokens", "41").data
    for name, ratio in data["ratios"].items():
        assert data["predicted_ratios"][name] == pytest.approx(ratio, rel=0.05)


def test_ar_with_all_cores_is_one_more_column_of_every_prompt(bench: Callable[..., Outcome]) -> None:
    engine = ScriptedEngine()
    outcome = bench(engine, "--ar-all-cores", "--prompts", "2", "--max-new-tokens", "21")
    assert modes_and_prompts(engine.requests[4:]) == [
        (mode, PROMPTS[i].text) for i in range(2) for mode in ("ar", "sd", "ssd", "ar")
    ]
    assert engine.config is not None
    assert engine.config.placement == Placement(target="cpu:0-1", draft="cpu:0-1")
    assert outcome.data["ratios"]["ssd_over_ar_all_cores"] == pytest.approx(outcome.data["ratios"]["ssd_over_ar"])
    assert outcome.data["modes"]["ar_all_cores"]["num_runs"] == 2
    assert row(outcome.out, "ratio to AR, all cores [quartiles]")[-1] == "1.00"


def test_ar_with_all_cores_needs_cores(bench: Callable[..., Outcome]) -> None:
    gpu = replace(INFO, target=replace(INFO.target, cores=()))
    outcome = bench(ScriptedEngine(info=gpu), "--ar-all-cores", "--prompts", "1")
    assert outcome.status == 1
    assert "--ar-all-cores needs a pair on neighbouring CPU cores" in outcome.err


def test_rounds_are_split_by_hit_and_by_rows(bench: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACE, "ssd", (2, 0.025, "fallback", 0.002))
    outcome = bench(ScriptedEngine(), "--prompts", "1", "--max-new-tokens", "20")
    rounds = outcome.data["modes"]["ssd"]["rounds"]
    assert rounds["tokens_after_hit"] == pytest.approx(2.0)
    assert rounds["tokens_after_miss"] is None
    assert rounds["median_wait_ms_hit"] == pytest.approx(2.0)
    assert rounds["late_hit_rate"] == 1.0
    assert rounds["mean_verify_ms_by_rows"]["2"] == pytest.approx(25.0)
    assert outcome.data["modes"]["ar"]["rounds"]["mean_verify_ms_by_rows"] == {"1": pytest.approx(20.0)}
    assert row(outcome.out, "hits that wait > 1 ms") == ["n/a", "n/a", "100%"]


def test_memory_is_na_where_the_system_does_not_tell(bench: Callable[..., Outcome]) -> None:
    outcome = bench(ScriptedEngine(), "--modes", "ar", "--prompts", "1", "--max-new-tokens", "5")
    assert "memory: n/a" in outcome.out
    assert outcome.data["memory"] is None


def test_the_table_shows_every_figure(bench: Callable[..., Outcome]) -> None:
    out = bench(ScriptedEngine(), "--prompts", "2", "--max-new-tokens", "20").out
    assert row(out, " ") == ["AR", "SD", "SSD"]
    assert row(out, "acceptance") == ["n/a", "100%", "100%"]
    assert row(out, "cache hit rate") == ["n/a", "n/a", "100%"]
    assert row(out, "tokens per speculated round") == ["n/a", "2.00", "2.00"]
    assert row(out, "tokens per round, all") == ["1.00", "2.00", "2.00"]
    assert row(out, "verify, mean ms") == ["20.0", "25.0", "25.0"]
    assert row(out, "draft step, mean ms") == ["n/a", "25.0", "n/a"]
    assert row(out, "cache build, mean ms") == ["n/a", "n/a", "25.0"]
    assert row(out, "wait for draft, mean ms") == ["n/a", "25.0", "0.0"]
    assert row(out, "build inside verify") == ["n/a", "n/a", "100%"]
    assert row(out, "ratio to AR [quartiles]")[0] == "1.00"
    assert row(out, "ratio to SD [quartiles]")[:2] == ["1.00", "2.00"]
    assert "same tokens: yes" in out


def test_plain_rounds_count_only_where_the_name_says_all() -> None:
    figures = RunFigures(
        num_tokens=30, num_rounds=20, num_spec_steps=10, num_draft_tokens=40, num_accepted_draft_tokens=10
    )
    finished = replace(RunFinished.unstarted("r"), figures=figures)
    summary = summarise_column([Measurement(mode="ssd", column="ssd", prompt=0, repeat=0, finished=finished)])
    assert (summary.mean_acceptance_length, summary.tokens_per_round) == (2.0, 1.5)


def test_different_tokens_are_reported_with_their_place_and_do_not_fail(bench: Callable[..., Outcome]) -> None:
    outcome = bench(ScriptedEngine(differ_in="ssd"), "--prompts", "2", "--max-new-tokens", "6")
    assert outcome.status == 0
    assert outcome.data["same_tokens"] is False
    assert outcome.data["differences"][1] == {
        "prompt": 1,
        "repeat": 0,
        "modes": ["ar", "ssd"],
        "index": 3,
        "token_ids": [3, 13],
    }
    assert "same tokens: no, 2 answers differ" in outcome.out
    assert "prompt 2, repeat 1, at index 3: ar has token 3, ssd has token 13" in outcome.out


def test_one_mode_has_no_ratio_and_nothing_to_compare(bench: Callable[..., Outcome]) -> None:
    outcome = bench(ScriptedEngine(), "--modes", "ssd", "--prompts", "1", "--max-new-tokens", "5")
    assert outcome.data["ratios"] == {"ssd_over_ar": None, "ssd_over_sd": None, "sd_over_ar": None}
    assert outcome.data["same_tokens"] is None
    assert "ratio" not in outcome.out
    assert "same tokens: n/a" in outcome.out


def test_answers_of_one_token_have_no_speed(bench: Callable[..., Outcome]) -> None:
    outcome = bench(ScriptedEngine(), "--prompts", "1", "--max-new-tokens", "1")
    assert outcome.status == 0
    assert row(outcome.out, "tokens/s, median") == ["n/a"] * 3
    assert row(outcome.out, "ratio to AR [quartiles]") == ["1.00", "n/a", "n/a"]
    assert outcome.data["ratios"]["ssd_over_ar"] is None
    assert outcome.data["notes"] == []


def test_notices_of_the_engine_are_shown(bench: Callable[..., Outcome]) -> None:
    outcome = bench(ScriptedEngine(notice="The draft was lost."), "--prompts", "1", "--max-new-tokens", "5")
    assert "prompt 1, ssd: The draft was lost." in outcome.out
    assert "prompt 1, ssd: The draft was lost." in outcome.data["notes"]


def test_speculation_that_never_ran_is_said(bench: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACE, "sd", (1, 0.025, "step", 0.0))
    outcome = bench(ScriptedEngine(), "--modes", "ar,sd", "--prompts", "1", "--max-new-tokens", "5")
    assert "prompt 1, sd: nothing was drafted" in outcome.out
