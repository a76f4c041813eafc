"""The simulator's command line: from options, from a benchmark's file, and for the paper's setting."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_bench import Outcome, ScriptedEngine, command_line

from saguaro_core.simulate import main
from saguaro_core.simulate_bench import compare, scenarios
from saguaro_core.simulate_file import read_benchmark
from saguaro_core.simulate_paper import LLAMA, PAPER, QWEN, REPRODUCTION, paper_rows, paper_scenario
from saguaro_core.simulate_run import simulate

DOCS = Path(__file__).parent.parent / "docs" / "simulator.md"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Call the command line: its status, standard output and standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            status = main(arguments)
        except SystemExit as error:
            status = int(str(error.code))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def bench_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A file of a scripted engine: AR 50, SD 40 and SSD 80 tokens/s, two tokens a round, every round a hit."""
    call: Callable[..., Outcome] = command_line(tmp_path, capsys)
    assert call(ScriptedEngine(), "--prompts", "2", "--max-new-tokens", "40", "--lookahead", "1").status == 0
    return tmp_path / "out.json"


# -- from options ---------------------------------------------------------------------------------------------------


def test_options_give_a_table_per_acceptance(run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = run("--acceptance", "0.6,0.7", "--tokens", "64", "--answers", "2")
    assert status == 0
    assert [line for line in out.splitlines() if line.startswith("acceptance")] == ["acceptance 0.6", "acceptance 0.7"]
    assert [line.split()[0] for line in out.splitlines() if line[:3] in ("AR ", "SD ", "SSD")] == [
        "AR",
        "SD",
        "SSD",
    ] * 2


def test_the_timeline_lists_the_first_events(run: Callable[..., tuple[int, str, str]]) -> None:
    _, out, _ = run("--timeline", "3", "--tokens", "16", "--answers", "1", "--acceptance", "1", "--hit-rate", "1")
    assert out.splitlines()[-3:] == [
        "      0.00 ms  round 0     draft   verdict received",
        "      0.00 ms  round 0     draft   3 forwards just in time",
        "     17.10 ms  round 0     draft   speculation sent",
    ]


def test_every_input_can_be_given(run: Callable[..., tuple[int, str, str]]) -> None:
    options = "--verify 1:20,4:24 --draft-step 1:2,8:4 --serve 0.5 --plant 0.2 --overhead 1 --link 0.3 --lookahead 4"
    more = "--budget 8 --fan-out uniform --backup fast --backup-tokens 1.4 --early wait --batch-size 2 --tokens 32"
    last = "--answers 2 --target-devices 4 --draft-devices 2 --acceptance-hit 0.8 --power-law 1.5 --seed 3"
    status, out, _ = run(*options.split(), *more.split(), *last.split())
    assert status == 0
    assert "SSD" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--acceptance", "high"], "acceptance is 'high': write numbers between commas"),
        (["--acceptance", "1.5"], "acceptance is 1.5: give a number from 0 to 1"),
        (["--verify", "a"], "time 'a': write milliseconds"),
        (["--link", "-1"], "link time is -1.0"),
        (["--batch-size", "0"], "batch_size is 0"),
        (["--from", "no/such/file"], "cannot be used"),
        (["--timeline", "-3"], "timeline is -3: give a number of events"),
        (["--paper", "--acceptance", "0.4"], "acceptance is '0.4': --paper solves it from the paper's SD"),
    ],
)
def test_what_cannot_be_used_is_said(
    run: Callable[..., tuple[int, str, str]], arguments: list[str], message: str
) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert message in err


# -- from a benchmark's file ----------------------------------------------------------------------------------------


def test_a_benchmarks_file_is_simulated_as_it_was_measured(bench_file: Path) -> None:
    rows = {row.name: row for row in compare(read_benchmark(bench_file))}
    for name, value in (("AR, tokens/s", 50), ("SD, tokens/s", 40), ("SSD, tokens/s", 80), ("SSD / SD", 2)):
        assert rows[name].measured == pytest.approx(value)
        assert rows[name].simulated == pytest.approx(value, rel=0.02)
        assert rows[name].predicted == pytest.approx(value, rel=0.02)
    assert rows["SSD, hit rate"].simulated == 1.0
    assert rows["SSD, tokens per round, all"].simulated == pytest.approx(2.0, rel=0.03)


def test_how_long_ssd_waited_and_how_fast_it_was_do_not_go_in(bench_file: Path) -> None:
    data = json.loads(bench_file.read_text())
    found = []
    for wait in (0.0, 30.0):
        for run in data["runs"]:
            if run["mode"] == "ssd":
                rounds = {"mean_wait_ms": wait, "mean_round_ms": 27.0 + wait}
                run["figures"].update(decode_tokens_per_second=2e3 / (27.0 + wait), **rounds)
        bench_file.write_text(json.dumps(data))
        found.append({row.name: row.simulated for row in compare(read_benchmark(bench_file))})
    assert found[0] == found[1]


def test_the_file_is_printed_with_what_a_better_draft_gives(
    run: Callable[..., tuple[int, str, str]], bench_file: Path
) -> None:
    status, out, _ = run("--from", str(bench_file), "--acceptance", "0.6,0.7")
    assert status == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["SSD", "/", "AR", "1.60", "1.60", "+0.0%", "1.60", "+0.0%"] in lines
    assert "ratios: simulated within 0." in out
    assert [line[0] for line in lines if line and line[0] in ("0.6", "0.7")] == ["0.6", "0.7"]
    assert any(line[:3] == ["power", "law", "r"] for line in lines)


def test_a_file_without_a_mode_is_compared_but_not_projected(
    run: Callable[..., tuple[int, str, str]], bench_file: Path
) -> None:
    data = json.loads(bench_file.read_text())
    data["runs"] = [run for run in data["runs"] if run["mode"] != "sd"]
    bench_file.write_text(json.dumps(data))
    status, out, _ = run("--from", str(bench_file))
    assert status == 0
    assert "SSD / SD" not in out
    status, _, err = run("--from", str(bench_file), "--acceptance", "0.6")
    assert status == 2
    assert "--acceptance needs ar, sd, ssd" in err


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.clear(),
        lambda data: data["runs"].clear(),
        lambda data: data["runs"][0].pop("figures"),
        lambda data: data["settings"]["speculation"].update(lookahead=-1),
    ],
    ids=["empty", "no runs", "a run without figures", "a setting out of range"],
)
def test_a_broken_file_is_refused_with_the_command_that_writes_one(
    bench_file: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    data = json.loads(bench_file.read_text())
    change(data)
    bench_file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"write one with python -m saguaro_core\.bench --json FILE"):
        read_benchmark(bench_file)


def test_what_is_no_run_of_the_pair_is_passed_over(bench_file: Path) -> None:
    data = json.loads(bench_file.read_text())
    data["settings"]["speculation"]["later"] = 1
    data["runs"].append({**data["runs"][0], "mode": "later", "column": "later"})
    data["runs"].append({**data["runs"][0], "column": "ar_all_cores", "figures": {"mean_verify_ms": 1.0}})
    bench_file.write_text(json.dumps(data))
    benchmark = read_benchmark(bench_file)
    assert set(benchmark.pooled) == {"ar", "sd", "ssd"}
    assert set(scenarios(benchmark.pooled, benchmark)) == {"ar", "sd", "ssd"}
    assert benchmark.pooled["ar"].mean_verify_ms == pytest.approx(20.0)


# -- the paper's setting --------------------------------------------------------------------------------------------


def test_speculative_decoding_agrees_with_the_paper_by_construction() -> None:
    """Answers end within a round and the first is not timed: 3% at 512 tokens."""
    for row in paper_rows((PAPER[1], PAPER[-1], REPRODUCTION[0])):
        found = simulate(paper_scenario(row.measured, "sd", row.acceptance, 0.85), seed=1)
        assert found.tokens_per_second == pytest.approx(row.measured.sd, rel=0.03)


def test_published_times_agree_with_each_other() -> None:
    """The Llama pair's step was solved from SD; the Qwen pair's verification is the published one."""
    sd_round = 1e3 / 54.0 * LLAMA.verify_over_decode + LLAMA.sd_lookahead * LLAMA.draft_step
    assert 172 * sd_round / 1e3 == pytest.approx(238 * 23.30e-3, rel=0.01)
    assert 1e3 / 97.4 * QWEN.verify_over_decode == pytest.approx(11.45)


def test_the_paper_is_predicted_and_the_documentation_shows_the_very_tables(
    run: Callable[..., tuple[int, str, str]],
) -> None:
    status, out, _ = run("--paper")
    assert status == 0
    text = DOCS.read_text(encoding="utf-8")
    for line in out.splitlines():
        assert line in text, "run python -m saguaro_core.simulate --paper and put its output into docs/simulator.md"
    differences = [line.split()[-7] for line in out.splitlines() if line.startswith("Llama-3.1 70B / 1B  ")]
    assert all(abs(float(value.rstrip("%"))) < 6 for value in differences)
