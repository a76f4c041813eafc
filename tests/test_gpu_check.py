"""The check of GPUs, rehearsed on the CPU; how it reports checks that fail, raise, hang or die."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_cuda import pretend_cuda

from saguaro_core.checks.local import LocalDraft, LocalEngine
from saguaro_core.checks.random_models import make_tiny_pair
from saguaro_core.checks.rows import Problems, Row, Setting, format_table, reported_in
from saguaro_core.config import SamplingParams, SpeculationConfig
from saguaro_core.gpu_check import Check, main, run_isolated

REHEARSAL = ["--device", "cpu", "--tiny"]
NAMES = {
    "devices",
    "placement on one device",
    "placement on two devices",
    "target sharded over two devices",
    "AR = SD = SSD, random pair",
    "AR = SD = SSD, default pair",
    "distribution: SD, rejection",
    "distribution: SSD, rejection",
    "distribution: SSD, shared noise",
    "distribution: a wrong rule is caught",
    "compiled shapes, tiny model",
    "tiny target: decode, 1 row",
    "tiny target: verify, 5 rows",
    "tiny draft: draft step, 1 row",
    "tiny draft: branch pass, 12 rows",
    "rounds, forced acceptance: AR",
    "rounds, forced acceptance: SD",
    "rounds, forced acceptance: SSD",
    "rounds, forced acceptance: overlap",
}


def test_every_check_runs_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    assert main([*REHEARSAL, "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    data = json.loads(file.read_text("utf-8"))
    rows = {row["check"]: row for row in data["rows"]}
    assert set(rows) == NAMES
    assert all(f"| {name} " in shown for name in NAMES)
    assert "no time above is one of a GPU's" in shown
    assert "0 failed" in shown
    skipped = {name for name, row in rows.items() if row["result"] == "skipped"}
    assert skipped == {
        "placement on two devices",
        "target sharded over two devices",
        "AR = SD = SSD, default pair",
        "compiled shapes, tiny model",
    }
    assert all(rows[name]["detail"] for name in skipped)
    assert rows["tiny target: verify, 5 rows"]["data"]["fixed_ms"] > 0
    assert rows["distribution: a wrong rule is caught"]["data"]["p"] < 1e-9


def failing(setting: Setting) -> list[Row]:
    return [Row("one that fails", "failed", "something is wrong")]


def raising(setting: Setting) -> list[Row]:
    raise RuntimeError("the device\nwent away")


def passing(setting: Setting) -> list[Row]:
    return [Row("one that passes", "passed", "a | b")]


def test_a_failing_and_a_raising_check_do_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    checks = {"raises": Check(raising, 1), "fails": Check(failing, 1), "passes": Check(passing, 1)}
    assert main(REHEARSAL, checks) == 1
    shown = capsys.readouterr().out
    assert "RuntimeError: the device went away" in shown
    assert "something is wrong" in shown
    assert "a / b" in shown
    assert "1 passed, 2 failed, 0 skipped, 0 measured" in shown


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shared noise": ({"temperature": 1.0, "top_k": 20, "top_p": 0.9}, {"fallback": "fast"}),
    "rejection": ({"temperature": 1.0, "top_p": 0.9}, {"rule": "rejection", "saguaro_c": 0.5}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_over_two_pretended_gpus_says_what_it_says_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling, speculation = RUNS[name]

    def decode(first: str, second: str) -> tuple[int, ...]:
        target, draft = make_tiny_pair((first, second), difference=0.1)
        engine = LocalEngine(target, LocalDraft(draft, second), first)
        settings = SpeculationConfig(lookahead=2, budget=4, **speculation)
        return engine.run("ssd", [3, 1, 4, 1, 5], SamplingParams(max_new_tokens=6, **sampling), settings).token_ids

    wanted = decode("cpu", "cpu")
    with pretend_cuda(monkeypatch, 2):
        assert decode("cuda:0", "cuda:1") == wanted


def test_only_some_checks(capsys: pytest.CaptureFixture[str]) -> None:
    checks = {"fails": Check(failing, 1), "passes": Check(passing, 1)}
    assert main([*REHEARSAL, "--only", "passes"], checks) == 0
    with pytest.raises(SystemExit) as ended:
        main([*REHEARSAL, "--only", "passes,other"], checks)
    assert ended.value.code == 2
    assert "the checks are fails, passes" in capsys.readouterr().err


def test_without_a_gpu_the_command_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "no CUDA device is here. --device cpu --tiny" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "seconds", "problem"),
    [
        ("import time; time.sleep(60)", 0.5, "did not end within"),
        ("import os; os._exit(7)", 30, "ended with exit status 7"),
        ("", 0, "not started"),
    ],
)
def test_a_check_that_hangs_or_dies_is_a_failed_row(code: str, seconds: float, problem: str) -> None:
    (row,) = run_isolated("rounds", [sys.executable, "-c", code], seconds)
    assert (row.check, row.result) == ("rounds", "failed")
    assert problem in row.detail


def test_an_isolated_check_hands_its_rows_over() -> None:
    code = (
        "import json, sys; rows = [{'check': 'a', 'result': 'measured', 'detail': 'b', 'data': {'ms': 1.5}}];"
        "open(sys.argv[2], 'w').write(json.dumps({'rows': rows})); sys.exit(1)"
    )
    assert run_isolated("a", [sys.executable, "-c", code], 30) == [Row("a", "measured", "b", {"ms": 1.5})]


def test_problems_come_before_the_detail() -> None:
    problems = Problems()
    problems.expect(True, "not this")
    assert problems.row("x", "seen").result == "passed"
    problems.expect(False, "this")
    assert problems.row("x", "seen") == Row("x", "failed", "this; seen")


def refuse() -> None:
    raise ValueError("long " * 1000)


def test_long_errors_are_cut() -> None:
    rows: list[Row] = []
    with reported_in(rows, "x"):
        refuse()
    assert len(rows[0].detail) == 300
    assert format_table(rows).count("\n") == 3


def test_a_setting_names_its_places() -> None:
    assert Setting(("cuda:0",)).places == "both models share cuda:0"
    assert Setting(("cuda:0", "cuda:1")).places == "target on cuda:0, draft on cuda:1"
