"""The read side: searching, filtering and paging the history, and that reading never writes."""

import json
import sqlite3
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_samples import dump, make_events, make_info, make_request, record_all, record_comparison, start

from saguaro_core.errors import InvalidRequest
from storage import LogReader, NotStored, Recorder, StorageError

PROMPTS = {
    "cacti": "Tell me about the saguaro cactus.",
    "code": 'Write def foo(bar): return bar * 2 -- 100% NEAR "quoted" AND it\'s under_score',
    "japanese": "日本語で説明してください。",
    "accents": "Où est le café ☕?",
}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("queries") / "log.db"
    with Recorder(path) as recorder:
        for name, prompt in PROMPTS.items():
            record_comparison(recorder, name, prompt, modes=("ar", "sd", "ssd"))
        start(recorder, "cut", ["cut-run"], make_request("A long story"))
        record_all(recorder, make_events("cut-run", status="stopped", stop_reason="user", text="Once upon a mesa"))
        assert recorder.wait_saved("cut-run", 10)
    return path


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ["cut", "accents", "japanese", "code", "cacti"]),
        ("   ", ["cut", "accents", "japanese", "code", "cacti"]),
        ("SAGUARO", ["cacti"]),
        ("about cact", ["cacti"]),
        ("guar", ["cacti"]),
        ("日本語", ["japanese"]),
        ("説明", ["japanese"]),
        ("☕", ["accents"]),
        ("café", ["accents"]),
        ("foo(bar):", ["code"]),
        ("*", ["code"]),
        ("--", ["code"]),
        ("100%", ["code"]),
        ("%", ["code"]),
        ("r_s", ["code"]),
        ("_", ["code"]),
        ('"quoted"', ["code"]),
        ("it's", ["code"]),
        ("NEAR AND", ["code"]),
        ("NOT saguaro", []),
        ("mesa", ["cut"]),
        ("story mesa", ["cut"]),
        ("saguaro mesa", []),
        ("title:saguaro", []),
        ("no such words", []),
        ("\0", ["cut", "accents", "japanese", "code", "cacti"]),
        ("\ud83d", []),
        ("x" * 100_000, []),
        ("word " * 10_000, []),
    ],
)
def test_search_finds_every_word_as_typed(log: Path, text: str, found: list[str]) -> None:
    page = LogReader(log).history(text)
    assert [entry.id for entry in page.entries] == found
    assert page.total == len(found)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(
    text=st.text(alphabet=st.sampled_from(list("\"'()*:^-+{}[]%_\\,;ab NEARORNOT\0日")), max_size=20)
    | st.text(max_size=20)
)
def test_no_search_text_raises(log: Path, text: str) -> None:
    page = LogReader(log).history(text)
    assert len(page.entries) == page.total


def test_filters_hold_for_the_same_run(log: Path) -> None:
    reader = LogReader(log)
    assert reader.history(mode="ar").total == 4
    assert [entry.id for entry in reader.history(status="stopped").entries] == ["cut"]
    assert [entry.id for entry in reader.history(status="stopped", mode="ssd").entries] == ["cut"]
    assert reader.history(status="stopped", mode="ar").total == 0
    assert reader.history("saguaro", status="finished", mode="sd").total == 1
    assert reader.history(status="running").entries == ()


def test_pages_neither_skip_nor_repeat_when_new_comparisons_arrive(log: Path, tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    with Recorder(path) as recorder:
        for number in range(7):
            start(recorder, f"c{number}", [], make_request())
        assert recorder.flush(10)
        reader = LogReader(path)
        first = reader.history(limit=3)
        start(recorder, "new", [], make_request())
        assert recorder.flush(10)
        second = reader.history(limit=3, before=first.next_before)
        third = reader.history(limit=3, before=second.next_before)
    assert [entry.id for entry in first.entries + second.entries + third.entries] == [f"c{n}" for n in range(6, -1, -1)]
    assert (first.total, third.total, third.next_before) == (7, 8, None)


def test_entries_carry_the_figures_of_their_runs(log: Path) -> None:
    entry = LogReader(log).history("saguaro").entries[0]
    assert [run.mode for run in entry.runs] == ["ar", "sd", "ssd"]
    detail = LogReader(log).run("cacti-ssd").run
    assert detail.figures is not None
    assert entry.runs[2].decode_tokens_per_second == detail.figures.decode_tokens_per_second
    assert entry.runs[2].cache_hit_rate == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "eagle"}, "mode is 'eagle': choose one of ar, sd, ssd"),
        ({"status": "queued"}, "status is 'queued': choose one of running"),
        ({"limit": 0}, "limit is 0: give a whole number from 1 to 500"),
        ({"limit": 501}, "limit is 501"),
    ],
)
def test_wrong_filters_are_named(log: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        LogReader(log).history(**arguments)  # type: ignore[arg-type]


def test_unknown_ids_are_named(log: Path) -> None:
    with pytest.raises(NotStored, match="no run 'nobody'"):
        LogReader(log).run("nobody")
    with pytest.raises(NotStored, match="no comparison 'nothing'"):
        LogReader(log).comparison("nothing")


def test_missing_or_broken_file_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="could not be read"):
        LogReader(tmp_path / "nowhere.db").history()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "text.db").write_text("This is no database." * 100)
    with pytest.raises(StorageError, match="not a SQLite database"):
        LogReader(tmp_path / "text.db").history()


def test_what_is_read_is_ready_for_json(log: Path) -> None:
    reader = LogReader(log)
    for value in (reader.history(), reader.comparison("code"), reader.run("code-ssd")):
        assert json.loads(json.dumps(asdict(value), allow_nan=False))


def test_reading_cannot_write(log: Path) -> None:
    before = dump(log)
    with LogReader(log).snapshot() as db:
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            db.execute("DELETE FROM comparisons")
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            db.execute("CREATE TABLE t (a)")
    assert dump(log) == before


def test_snapshot_shows_one_moment(tmp_path: Path) -> None:
    with Recorder(tmp_path / "log.db") as recorder:
        record_comparison(recorder, "c")
        with LogReader(tmp_path / "log.db").snapshot() as db:
            assert db["runs"].count == 1
            assert recorder.delete_comparison("c")
            assert db["runs"].count == 1
        assert LogReader(tmp_path / "log.db").history().total == 0


def test_one_reader_serves_many_threads(log: Path) -> None:
    reader, seen = LogReader(log), []
    threads = [threading.Thread(target=lambda: seen.append(len(reader.run("cacti-ar").tokens))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [6] * 12


def test_draftless_engine_is_stored_without_a_draft(tmp_path: Path) -> None:
    info = replace(make_info(), draft=None, draft_error="the draft's folder is missing", num_devices=1)
    with Recorder(tmp_path / "log.db") as recorder:
        recorder.start_comparison("c", make_request().messages, {})
        recorder.start_run("r", "c", make_request(mode="ar"), info)
        record_all(recorder, make_events("r", mode="ar"))
        assert recorder.wait_saved("r", 10)
    assert LogReader(tmp_path / "log.db").run("r").run.engine["draft"] is None
