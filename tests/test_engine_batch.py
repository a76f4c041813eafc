"""Batches on the real pair, in its real processes."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from engine_runs import STORY, EngineRun, greedy, start_batch, start_run

from saguaro_core.checks.near_ties import TieJudge
from saguaro_core.config import GenerationRequest, Message, Mode, SamplingParams
from saguaro_core.engine import Engine
from saguaro_core.errors import InvalidRequest
from saguaro_core.events import RunFinished, RunStarted

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent

PROMPTS = ("Say hello.", STORY, "What is 3 plus 4?")
SAMPLINGS = [SamplingParams(temperature=0.8, seed=40 + row, max_new_tokens=16 - row) for row in range(3)]


@pytest.fixture(scope="module")
def solo(engine: Engine) -> list[EngineRun]:
    runs = [start_run(engine, text, "ar", sampling) for text, sampling in zip(PROMPTS, SAMPLINGS, strict=True)]
    for run in runs:
        run.wait()
    return runs


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_each_row_is_its_solo_run(engine: Engine, solo: list[EngineRun], mode: Mode) -> None:
    runs = start_batch(engine, PROMPTS, mode, SAMPLINGS)
    for run, own, sampling in zip(runs, solo, SAMPLINGS, strict=True):
        assert run.wait().status == "finished"
        assert not run.notices
        if run.ids != own.ids:
            assert TieJudge().is_tie(own.prompt_ids, own.ids, run.ids, sampling), (own.ids, run.ids)
        assert sum(event.drafted for event in run.rounds) > 0 or mode == "ar"
        assert {event.cache for event in run.rounds} <= ({"compulsory", "hit", "miss"} if mode == "ssd" else {None})


def test_a_stopped_row_ends_and_the_others_go_on(engine: Engine, solo: list[EngineRun]) -> None:
    runs = start_batch(engine, (STORY, *PROMPTS), "ssd", [greedy(200), *SAMPLINGS])
    runs[0].wait_for_tokens(2)
    engine.stop(runs[0].run_id)
    assert runs[0].wait().status == "stopped"
    assert 2 <= len(runs[0].ids) < 200
    assert [run.wait().status for run in runs[1:]] == ["finished"] * 3
    assert [len(run.ids) for run in runs[1:]] == [len(run.ids) for run in solo]


def test_events_come_as_one_stream_and_leaving_it_stops_the_runs(engine: Engine) -> None:
    def request(count: int) -> GenerationRequest:
        message = Message(role="user", content=STORY)
        return GenerationRequest(messages=(message,), mode="sd", sampling=greedy(count), num_alternatives=0)

    events = list(engine.run_batch({"first": request(2), "second": request(4)}))
    assert [len(event.token_ids) for event in events if isinstance(event, RunFinished)] == [2, 4]
    assert {event.run_id for event in events if isinstance(event, RunStarted)} == {"first", "second"}
    long = engine.run_batch({"third": request(4000), "fourth": request(4000)})
    assert len(list(itertools.islice(long, 5))) == 5
    long.close()  # type: ignore[attr-defined]
    after = start_run(engine, STORY, "ar", greedy(1))
    assert after.wait(30).status == "finished"


def test_a_row_that_cannot_start_says_why_and_the_others_decode(engine: Engine, solo: list[EngineRun]) -> None:
    too_long, *others = start_batch(engine, ("word " * 9000, *PROMPTS[:2]), "ssd", SAMPLINGS[:1] + SAMPLINGS[:2])
    assert too_long.wait().status == "failed"
    assert "cannot hold it. Shorten the prompt." in (too_long.finished.error or "")
    assert [run.wait().token_ids for run in others] == [run.ids for run in solo[:2]]


def test_the_documented_example_runs_as_written(default_target_dir: Path) -> None:
    code = (ROOT / "docs" / "batches.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert {line.split()[0] for line in result.stdout.splitlines() if line} >= {"first", "second"}


def test_what_is_no_batch_is_refused_before_anything_starts(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="the batch has 0 requests: give 1 to 16"):
        engine.run_batch({})
