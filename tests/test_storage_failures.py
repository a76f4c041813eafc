"""A log that fails: it waits for a lock, says why it waits, gives up in the end, and never holds a run up."""

import shutil
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
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

from storage import LogReader, Recorder, RecorderLimits

QUICK = RecorderLimits(busy_timeout=0.05, retry_interval=0.05, give_up_after=0.5)

HOLD_LOCK = """
import sqlite3
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE comparisons SET title = 'changed by another program'")
print("locked", flush=True)
sys.stdin.readline()
connection.execute("ROLLBACK")
"""


class Lock:
    """Another process that holds the database's write lock until it is told to let go."""

    def __init__(self, path: Path) -> None:
        self._process = start_process(HOLD_LOCK, path)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "locked\n"

    def release(self) -> None:
        def let_go(process: "subprocess.Popen[str]") -> None:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

        assert end_process(self._process, let_go) == 0


def record_under_lock(path: Path, seconds: float, failures: list[str]) -> None:
    """Three runs stream while another process holds the lock for so long; all must be stored, exactly once."""
    with Recorder(path) as recorder:
        start(recorder, "c", ["r0", "r1", "r2"], make_request())
        assert recorder.flush(10)
        lock = Lock(path)
        timer = threading.Timer(seconds, lock.release)
        timer.start()
        began = slowest = time.monotonic()
        slowest = 0.0
        for run in range(3):
            for event in make_events(f"r{run}", 20):
                before = time.monotonic()
                recorder.record(event)
                slowest = max(slowest, time.monotonic() - before)
        if slowest > 0.2:
            failures.append(f"record took {slowest:.2f} s during the lock")
        if recorder.wait_saved("r0", seconds / 2):
            failures.append("a run reads as saved while the lock is held")
        if "another program holds its lock" not in str(recorder.problem):
            failures.append(f"the problem during the lock is {recorder.problem!r}")
        LogReader(path).history("cacti")
        if not all(recorder.wait_saved(f"r{run}", 30) for run in range(3)):
            failures.append(f"not saved after the lock: {recorder.problem}")
        if time.monotonic() - began < seconds:
            failures.append("the lock was not held for its time")
        timer.join()
        if recorder.problem is not None:
            failures.append(f"the problem after the lock is {recorder.problem!r}")
    rows = {"comparisons": 1, "runs": 3, "rounds": 60, "tokens": 120, "spans": 123, "notices": 3}
    if count_rows(path) != rows:
        failures.append(f"stored {count_rows(path)}")


def test_every_run_is_stored_once_when_another_process_holds_the_lock_for_3_and_for_20_seconds(tmp_path: Path) -> None:
    failures: list[str] = []
    waits = [
        threading.Thread(target=record_under_lock, args=(tmp_path / f"{seconds}.db", seconds, failures))
        for seconds in (3.0, 20.0)
    ]
    for wait in waits:
        wait.start()
    for wait in waits:
        wait.join()
    assert failures == []


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A log with one finished run."""
    with Recorder(tmp_path / "log.db") as recorder:
        record_comparison(recorder, "before")
    return tmp_path / "log.db"


@pytest.fixture
def lock(recorded: Path) -> Iterator[Lock]:
    held = Lock(recorded)
    yield held
    held.release()


def test_lock_that_outlasts_the_patience_is_given_up_visibly_and_the_next_run_is_stored(recorded: Path) -> None:
    with Recorder(recorded, limits=QUICK) as recorder:
        held = Lock(recorded)
        start(recorder, "lost", ["lost-run"], make_request())
        record_all(recorder, make_events("lost-run"))
        assert not recorder.wait_saved("lost-run", 10)
        assert "were lost: another program holds its lock" in str(recorder.problem)
        held.release()
        record_comparison(recorder, "after")
        assert recorder.problem is None
    assert query(recorded, "SELECT id, status FROM runs") == [("before-ssd", "finished"), ("after-ssd", "finished")]


def test_waiting_rows_are_bounded_and_the_run_says_that_it_lacks_some(recorded: Path) -> None:
    limits = RecorderLimits(busy_timeout=0.05, retry_interval=0.05, max_pending=20)
    with Recorder(recorded, limits=limits) as recorder:
        start(recorder, "c", ["r"], make_request())
        assert recorder.flush(10)
        held = Lock(recorded)
        record_all(recorder, make_events("r", 1000))
        assert recorder._thread.num_pending <= 21
        assert "already wait" in str(recorder.problem) or "another program" in str(recorder.problem)
        held.release()
        assert not recorder.wait_saved("r", 10)
        assert "20 rows already wait" in str(recorder.problem)
    run = LogReader(recorded).run("r").run
    assert (run.status, run.rows_complete, run.num_tokens) == ("finished", False, 2000)
    assert len(run.answer_token_ids) == 2000


def test_closing_under_a_lock_does_not_wait_for_ever(recorded: Path, lock: Lock) -> None:
    recorder = Recorder(recorded, limits=RecorderLimits(busy_timeout=0.05))
    start(recorder, "c", ["r"], make_request())
    began = time.monotonic()
    recorder.close(timeout=0.3)
    assert time.monotonic() - began < 3
    assert not recorder.wait_saved("r", 1)
    assert "lost" in str(recorder.problem)


def test_log_that_is_locked_at_the_start_for_longer_than_the_patience_loses_nothing(recorded: Path) -> None:
    held = Lock(recorded)
    with Recorder(recorded, limits=QUICK) as recorder:
        time.sleep(2 * QUICK.give_up_after)
        assert not recorder.flush(0.1)
        start(recorder, "c", ["r"], make_request())
        held.release()
        record_all(recorder, make_events("r"))
        assert recorder.wait_saved("r", 10)
        assert recorder.problem is None


def test_log_that_is_locked_at_the_start_opens_later(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    with Recorder(path, limits=RecorderLimits(busy_timeout=0.05)) as recorder:
        assert "another program holds its lock" in str(recorder.problem)
        connection.execute("ROLLBACK")
        connection.close()
        record_comparison(recorder, "c")
        assert recorder.problem is None


def test_dropped_table_is_a_visible_loss(recorded: Path) -> None:
    with Recorder(recorded, limits=QUICK) as recorder:
        start(recorder, "c", ["r"], make_request())
        assert recorder.flush(10)
        vandal = sqlite3.connect(recorded)
        vandal.execute("DROP TABLE rounds")
        vandal.close()
        record_all(recorder, make_events("r"))
        assert not recorder.wait_saved("r", 10)
        assert "no such table" in str(recorder.problem)
    # What was stored before is still there, and the run does not read as finished.
    assert query(recorded, "SELECT id, status FROM runs") == [("before-ssd", "finished"), ("r", "running")]


def test_file_that_was_deleted_is_noticed_and_made_anew(recorded: Path) -> None:
    with Recorder(recorded, limits=QUICK) as recorder:
        start(recorder, "c", ["r"], make_request())
        assert recorder.flush(10)
        for file in recorded.parent.glob("log.db*"):
            if not file.name.endswith(".lock"):
                file.unlink()
        record_all(recorder, make_events("r"))
        assert not recorder.wait_saved("r", 10)
        assert "were lost" in str(recorder.problem)
        record_comparison(recorder, "after")
        assert recorder.problem is None
    assert query(recorded, "SELECT id FROM runs") == [("after-ssd",)]


FULL_DISK = """
import resource
from pathlib import Path
from storage import Recorder, RecorderLimits
from storage_samples import *
recorder = Recorder(sys.argv[1], limits=RecorderLimits(busy_timeout=0.05, retry_interval=0.05, give_up_after=0.3))
start(recorder, "c", ["r"], make_request())
assert recorder.flush(10)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (Path(sys.argv[1] + "-wal").stat().st_size, hard))
record_all(recorder, make_events("r", 50))
print("streamed", flush=True)
assert not recorder.wait_saved("r", 10)
print(recorder.problem, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
record_comparison(recorder, "after")
print(recorder.problem, flush=True)
recorder.close()
"""


def test_file_that_cannot_grow_stops_no_stream_and_the_log_goes_on_when_it_can(recorded: Path) -> None:
    process = start_process(FULL_DISK, recorded)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    streamed, problem, later = output.splitlines()
    assert streamed == "streamed"
    assert problem.endswith("were lost: disk I/O error. Runs go on.")
    assert later == "None"
    assert query(recorded, "SELECT id, status FROM runs ORDER BY number") == [
        ("before-ssd", "finished"), ("r", "interrupted"), ("after-ssd", "finished")
    ]  # fmt: skip
    assert query(recorded, "PRAGMA integrity_check") == [("ok",)]


READ_ONLY = """
import os
from storage import Recorder, RecorderLimits
from storage_samples import *
if os.getuid() == 0:
    os.setuid(65534)
limits = RecorderLimits(busy_timeout=0.05, retry_interval=0.05, give_up_after=0.3)
recorder = Recorder(sys.argv[1], limits=limits)
start(recorder, "c", ["r"], make_request())
record_all(recorder, make_events("r"))
print(recorder.wait_saved("r", 10), flush=True)
print(recorder.problem, flush=True)
recorder.close()
"""


def test_read_only_log_stops_no_stream_and_is_not_changed() -> None:
    # Not below tmp_path, whose folders other users may not enter.
    folder = Path(tempfile.mkdtemp())
    path = folder / "log.db"
    try:
        with Recorder(path) as recorder:
            record_comparison(recorder, "before")
        content = path.read_bytes()
        path.chmod(0o444)
        folder.chmod(0o555)
        process = start_process(READ_ONLY, path)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 0
        is_saved, problem = output.splitlines()
        assert is_saved == "False"
        assert str(path) in problem
        assert path.read_bytes() == content
        assert [file.name for file in folder.iterdir()] == ["log.db"]
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)
