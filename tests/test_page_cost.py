"""The measurement of the page's cost: what it refuses, and that a run without a speed is named."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import page_cost
import pytest
from echo_engine import EchoEngine, Script
from storage_samples import record_comparison

from storage import Recorder
from ui.settings import CompareSettings

ROOT = Path(__file__).parent.parent


def test_it_runs_by_its_path_and_refuses_a_single_prompt() -> None:
    """Quartiles need two."""
    command = [sys.executable, "tests/page_cost.py", "--prompts", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "prompts is 1: give a whole number from 2 to 32." in done.stderr


@pytest.fixture
def run_alone() -> Iterator[Callable[..., float]]:
    engines: list[EchoEngine] = []

    def run(script: Script, max_new_tokens: int) -> float:
        engine: Any = EchoEngine(script)
        engines.append(engine)
        engine.start()
        engine.wait_ready(5)
        settings = CompareSettings.from_flat({"modes": ["ssd"], "max_new_tokens": max_new_tokens})
        return page_cost.alone(engine, settings)("Why?")

    yield run
    for engine in engines:
        engine.close()


def test_a_finished_run_has_its_speed(run_alone: Callable[..., float]) -> None:
    assert run_alone(Script(rate=None), 20) > 0


def test_a_run_that_failed_is_named_with_its_reason(run_alone: Callable[..., float]) -> None:
    with pytest.raises(SystemExit, match=r"The alone run of 'Why\?' is failed, not finished \(.*fail at token 3\)"):
        run_alone(Script(rate=None, fail_at={"ssd": 3}), 20)


def test_a_run_without_a_speed_is_named(run_alone: Callable[..., float]) -> None:
    with pytest.raises(SystemExit, match=r"The alone run of 'Why\?' has too few tokens"):
        run_alone(Script(rate=None), 1)


def test_a_run_that_does_not_end_is_named(run_alone: Callable[..., float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cost, "RUN_SECONDS", 0.2)
    with pytest.raises(SystemExit, match=r"The alone run of 'Why\?' did not end"):
        run_alone(Script(rate=1.0), 500)


def test_a_run_that_the_log_lacks_is_never_taken_from_another_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cost, "SETTLE_SECONDS", 0.0)
    database = tmp_path / "log.db"
    with Recorder(database) as recorder:
        with pytest.raises(SystemExit, match="The drawn run of 'mine' did not end"):
            page_cost.logged("drawn", "mine", database)
        record_comparison(recorder, "c", "mine")
        assert page_cost.logged("drawn", "mine", database) > 0
        record_comparison(recorder, "d", "another")
        with pytest.raises(SystemExit, match="The drawn run of 'mine' did not end"):
            page_cost.logged("drawn", "mine", database)
