"""Processes that really die, and processes that are only somebody else: what the log says about their runs."""

import re
import sqlite3
import subprocess
import time
from pathlib import Path

from storage_samples import (
    count_rows,
    end_process,
    make_events,
    make_request,
    query,
    record_all,
    record_comparison,
    start,
    start_process,
)

from storage import LogReader, Recorder
from storage.ownership import Ownership, is_dead

STREAM = """
import time
from saguaro_core.events import TokenEvent
from storage import Recorder
from storage_samples import *
recorder = Recorder(sys.argv[1])
start(recorder, "c", ["r"], make_request())
record_all(recorder, make_events("r", 0)[:-1])
for index in range(100_000):
    for event in make_round("r", index):
        recorder.record(event)
    print(index, time.time(), flush=True)
    time.sleep(0.01)
"""

SAVE = """
import signal, os
from storage import Recorder
from storage_samples import *
recorder = Recorder(sys.argv[1])
start(recorder, "c", ["r"], make_request())
record_all(recorder, make_events("r", 200))
assert recorder.wait_saved("r", 20)
print("saved", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

LIVE = """
from storage import Recorder
from storage_samples import *
recorder = Recorder(sys.argv[1])
start(recorder, "live", ["live-run"], make_request())
record_all(recorder, make_events("live-run", 2)[:-1])
assert recorder.flush(10)
print("running", flush=True)
sys.stdin.readline()
record_all(recorder, make_events("live-run", 4)[-1:])
assert recorder.wait_saved("live-run", 10)
recorder.close()
"""


def kill(process: "subprocess.Popen[str]") -> None:
    process.kill()


def test_killed_process_loses_at_most_the_last_moments_and_its_run_reads_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    process = start_process(STREAM, path)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(60)]
    process.kill()
    lines += process.stdout.readlines()
    end_process(process, kill)
    times = [float(line.split()[1]) for line in lines if re.fullmatch(r"\d+ [\d.]+\n", line)]
    assert LogReader(path).run("r").run.status == "running"

    with Recorder(path) as recorder:
        assert recorder.flush(10)
        detail = LogReader(path).run("r")
    stored = len(detail.rounds)
    # Rows wait 0.1 s for their commit; the rest is what a commit may take on a busy machine.
    assert stored >= sum(moment < times[-1] - 0.3 for moment in times) > 10
    assert (detail.run.status, detail.run.stop_reason) == ("interrupted", None)
    assert detail.run.answer == "".join(token.text for token in detail.tokens) != ""
    assert detail.run.answer_token_ids == tuple(token.token_id for token in detail.tokens)
    assert detail.run.figures is not None
    assert detail.run.figures.num_tokens == detail.run.num_tokens == len(detail.tokens)
    assert detail.run.figures.draft_acceptance_rate is not None
    # Rounds are whole or absent up to the one that the last commit cut.
    assert len(detail.tokens) in (2 * stored, 2 * stored + 1, 2 * stored + 2)
    assert LogReader(path).history(detail.run.answer.split()[0], status="interrupted").total == 1


def test_run_that_was_said_to_be_saved_is_there_after_a_kill(tmp_path: Path) -> None:
    process = start_process(SAVE, tmp_path / "log.db")
    assert process.stdout is not None
    assert process.stdout.readline() == "saved\n"
    assert end_process(process, lambda _: None) == -9
    assert count_rows(tmp_path / "log.db") == {
        "comparisons": 1, "runs": 1, "rounds": 200, "tokens": 400, "spans": 401, "notices": 1
    }  # fmt: skip
    assert LogReader(tmp_path / "log.db").run("r").run.status == "finished"


def test_runs_of_a_live_process_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    process = start_process(LIVE, path)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "running\n"
    with Recorder(path) as second:
        record_comparison(second, "mine")
        assert LogReader(path).run("live-run").run.status == "running"
    with Recorder(path) as third:
        assert third.flush(10)
    process.stdin.write("\n")
    process.stdin.flush()
    assert end_process(process, lambda _: None) == 0
    run = LogReader(path).run("live-run").run
    assert (run.status, run.error, run.num_tokens) == ("finished", None, 8)
    assert not list(tmp_path.glob("*.lock"))


def test_second_recorder_in_the_same_process_leaves_the_first_ones_runs_alone(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    with Recorder(path) as first:
        start(first, "c", ["r"], make_request())
        assert first.flush(10)
        with Recorder(path) as second:
            record_comparison(second, "other")
        assert LogReader(path).run("r").run.status == "running"
        record_all(first, make_events("r"))
        assert first.wait_saved("r", 10)
    assert query(path, "SELECT id, status FROM runs ORDER BY id") == [("other-ssd", "finished"), ("r", "finished")]


def test_a_process_id_that_is_used_again_proves_nothing(tmp_path: Path) -> None:
    """An owner is alive by its lock alone: the file it left behind does not count."""
    path = tmp_path / "log.db"
    ownership = Ownership(path)
    ownership.acquire()
    assert not is_dead(path, ownership.owner)
    ownership.release()
    assert is_dead(path, ownership.owner)
    path.with_name(f"log.db-owner-{ownership.owner}.lock").touch()
    assert is_dead(path, ownership.owner)


def test_killed_in_the_middle_of_a_write_leaves_a_sound_file(tmp_path: Path) -> None:
    for attempt in range(3):
        process = start_process(STREAM, tmp_path / "log.db")
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.05 * attempt)
        end_process(process, kill)
        with Recorder(tmp_path / "log.db") as recorder:
            assert recorder.flush(10)
            assert recorder.problem is None
            assert recorder.delete_comparison("c")
    connection = sqlite3.connect(tmp_path / "log.db")
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()
    assert set(count_rows(tmp_path / "log.db").values()) == {0}
