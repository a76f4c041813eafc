"""Exports: complete, streamed, safe to open in a spreadsheet, and enough to restore the rows."""

import csv
import io
import json
import re
import threading
import tracemalloc
import zipfile
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_samples import (
    TABLES,
    make_events,
    make_info,
    make_request,
    record_all,
    record_comparison,
    start,
)

from saguaro_core.config import SpeculationConfig
from saguaro_core.errors import InvalidRequest
from saguaro_core.run_figures import RunFigures
from storage import EXPORT_FORMATS, ExportFormat, LogReader, NotStored, Recorder, Selection, export
from storage.csv_export import safe_cell
from storage.database import open_for_writing
from storage.metric_definitions import METRIC_DEFINITIONS

HOSTILE = '=HYPERLINK("http://evil.example","x")'


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "log.db"
    with Recorder(path) as recorder:
        record_comparison(
            recorder, "first-comparison", "Tell me: <b>cactus</b>, naïve?/../x", modes=("ar", "sd", "ssd")
        )
        record_comparison(recorder, "second", "-1+1", modes=("ssd",))
        start(recorder, "hostile", ["hostile-run"], make_request(HOSTILE))
        record_all(
            recorder, make_events("hostile-run", text=HOSTILE, status="failed", stop_reason="error", error="@SUM(1)")
        )
        assert recorder.wait_saved("hostile-run", 10)
    return path


def export_bytes(path: Path, selection: Selection, export_format: ExportFormat) -> bytes:
    return b"".join(export(LogReader(path), selection, export_format).chunks)


def read_csvs(data: bytes) -> dict[str, list[dict[str, str]]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        return {
            name: list(csv.DictReader(io.StringIO(archive.read(name).decode(), newline="")))
            for name in archive.namelist()
            if name.endswith(".csv")
        }


ALL = Selection(comparison_ids=("second", "first-comparison", "hostile"))


def test_json_restores_every_row(log: Path, tmp_path: Path) -> None:
    """The rows of an export, put into a new log, are the rows that were exported."""
    document = json.loads(export_bytes(log, ALL, "json"))
    db = open_for_writing(tmp_path / "restored.db")

    def insert(table: str, row: Mapping[str, Any], **more: object) -> None:
        db.table(table).insert({**row, **more})

    for comparison in document["comparisons"]:
        runs = comparison.pop("runs")
        insert("comparisons", comparison)
        for run in runs:
            rows = {table: run.pop(table) for table in TABLES[2:]}
            insert("runs", run, owner="")
            for table, items in rows.items():
                for item in items:
                    insert(table, item)
    with LogReader(log).snapshot() as original:
        for table in TABLES:
            # Plain SQL writes JSON with other spaces; the data must be the same.
            assert list(_plain(db, table)) == list(_plain(original, table))
            assert db[table].count > 0
    db.close()


def _plain(db: Any, table: str) -> Any:
    from storage.rows import decode_row

    for row in db[table].rows:
        yield {**decode_row(row), "owner": ""}


def test_json_says_what_it_is_and_carries_the_whole_context(log: Path) -> None:
    document = json.loads(export_bytes(log, Selection(comparison_ids=("first-comparison",)), "json"))
    assert (document["format"], document["format_version"]) == ("saguaro-log", 1)
    assert document["schema"][0] == "m001_comparisons_and_runs"
    assert document["metric_definitions"] == METRIC_DEFINITIONS
    (comparison,) = document["comparisons"]
    assert [run["mode"] for run in comparison["runs"]] == ["ar", "sd", "ssd"]
    run = comparison["runs"][2]
    assert run["settings"]["speculation"]["lookahead"] == SpeculationConfig().lookahead
    assert run["versions"] == {"torch": "2.13.0", "transformers": "5.24.0"}
    assert (run["seed"], run["hardware"], run["target_revision"]) == (7, "Test CPU, 2 cores", "abc123")
    assert run["figures"]["cache_hit_rate"] == run["cache_hit_rate"] == 1.0
    assert run["tokens"][0]["alternatives"] == [
        {"token_id": 1, "text": " a", "p": 0.5},
        {"token_id": 2, "text": "<b>", "p": 0.125},
    ]
    assert "owner" not in run


def test_jsonl_is_one_event_a_line(log: Path) -> None:
    lines = export_bytes(log, ALL, "jsonl").decode().split("\n")
    assert lines.pop() == ""
    events = [json.loads(line) for line in lines]
    counts = {kind: sum(event["type"] == kind for event in events) for kind in ("comparison", "run", "round", "token")}
    assert counts == {"comparison": 3, "run": 5, "round": 15, "token": 30}
    assert events[0]["type"] == "export"
    assert events[0]["metric_definitions"] == METRIC_DEFINITIONS
    assert [event["id"] for event in events if event["type"] == "comparison"] == [
        "first-comparison",
        "second",
        "hostile",
    ]
    assert {event["run_id"] for event in events if event["type"] == "span"} == {
        e["id"] for e in events if e["type"] == "run"
    }


def test_csv_zip_has_runs_rounds_tokens_and_what_they_mean(log: Path) -> None:
    data = export_bytes(log, ALL, "csv")
    files = read_csvs(data)
    assert {name: len(rows) for name, rows in files.items()} == {"runs.csv": 5, "rounds.csv": 15, "tokens.csv": 30}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        about = json.loads(archive.read("about.json"))
    assert about["metric_definitions"] == METRIC_DEFINITIONS
    run = files["runs.csv"][2]
    assert (run["mode"], run["seed"], run["hardware"], run["cache_hit_rate"]) == (
        "ssd",
        "7",
        "Test CPU, 2 cores",
        "1.0",
    )
    assert json.loads(run["settings"])["sampling"]["seed"] == 7
    assert json.loads(run["versions"])["torch"] == "2.13.0"
    # Undefined is empty, never 0.
    assert files["runs.csv"][0]["cache_hit_rate"] != "0"
    assert files["tokens.csv"][1]["text"] == " w1"


def test_csv_cells_cannot_be_formulas(log: Path) -> None:
    (run,) = read_csvs(export_bytes(log, Selection(run_ids=("hostile-run",)), "csv"))["runs.csv"]
    assert run["answer"] == "'" + HOSTILE
    assert run["error"] == "'@SUM(1)"
    # The log itself and the other formats keep the text as it is.
    document = json.loads(export_bytes(log, Selection(run_ids=("hostile-run",)), "json"))
    assert document["comparisons"][0]["runs"][0]["answer"] == HOSTILE
    assert document["comparisons"][0]["prompt"] == HOSTILE


@pytest.mark.parametrize(
    ("cell", "safe"),
    [
        ("=1+1", "'=1+1"),
        ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'\t=1"),
        ("\r=1", "'\r=1"),
        ("\n=1", "'\n=1"),
        ("＝1", "'＝1"),
        ("-", "'-"),
        ("-1\n", "'-1\n"),
        ("-١", "'-١"),
        ("plain", "plain"),
        ("a=b", "a=b"),
        ("", ""),
        ("-42", "-42"),
        ("+3.25e-7", "+3.25e-7"),
        ("-.5", "-.5"),
        (-5, -5),
        (-1.5e-9, -1.5e-9),
        (None, None),
    ],
)
def test_cells_are_made_safe_without_breaking_numbers(cell: str | float | None, safe: str | float | None) -> None:
    assert safe_cell(cell) == safe


@settings(derandomize=True, max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.sampled_from(list("=+-@\t\r\n0123456789.eE'\"a, ")), max_size=8))
def test_no_text_cell_begins_a_formula(text: str) -> None:
    cell = safe_cell(text)
    assert isinstance(cell, str)
    if cell[:1] in tuple("=+-@\t\r\n") and cell:
        float(cell)
    else:
        assert cell in (text, "'" + text)


def test_run_is_exported_inside_its_comparison(log: Path) -> None:
    document = json.loads(export_bytes(log, Selection(run_ids=("first-comparison-sd",)), "json"))
    (comparison,) = document["comparisons"]
    assert comparison["id"] == "first-comparison"
    assert [run["id"] for run in comparison["runs"]] == ["first-comparison-sd"]
    assert [len(run["tokens"]) for run in comparison["runs"]] == [6]


@pytest.mark.parametrize(
    ("selection", "export_format", "name"),
    [
        (Selection(run_ids=("first-comparison-sd",)), "json", r"saguaro-sd-\d{4}-\d\d-\d\d-\d{6}-SLUG-first-co\.json"),
        (Selection(comparison_ids=("first-comparison",)), "csv", r"saguaro-compare-[\d-]+-SLUG-first-co-csv\.zip"),
        (Selection(comparison_ids=("second",)), "jsonl", r"saguaro-compare-[\d-]+-1-1-second\.jsonl"),
        (ALL, "json", r"saguaro-selection-3-comparisons-[\d-]+\.json"),
    ],
)
def test_file_names_say_what_is_inside(log: Path, selection: Selection, export_format: ExportFormat, name: str) -> None:
    name = name.replace("SLUG", "tell-me-b-cactus-b-naive-x")
    assert re.fullmatch(name, export(LogReader(log), selection, export_format).filename)


@pytest.mark.parametrize("export_format", EXPORT_FORMATS)
def test_unknown_ids_are_refused_before_anything_is_sent(log: Path, export_format: ExportFormat) -> None:
    with pytest.raises(NotStored, match="no comparison 'nothing'"):
        export(LogReader(log), Selection(comparison_ids=("second", "nothing")), export_format)
    with pytest.raises(NotStored, match="no run 'nobody'"):
        export(LogReader(log), Selection(run_ids=("nobody",)), export_format)
    with pytest.raises(InvalidRequest, match="selection is empty"):
        export(LogReader(log), Selection(), export_format)


def test_unknown_format_is_named(log: Path) -> None:
    with pytest.raises(InvalidRequest, match="format is 'xml': choose one of json, jsonl, csv"):
        export(LogReader(log), ALL, "xml")  # type: ignore[arg-type]


def test_every_figure_is_defined() -> None:
    assert set(METRIC_DEFINITIONS) == {field.name for field in fields(RunFigures)}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "log.db"
    with Recorder(path) as recorder:
        start(recorder, "c", ["r"], make_request())
        record_all(recorder, make_events("r", 2500))
        assert recorder.wait_saved("r", 30)
    return path


@pytest.mark.parametrize("export_format", EXPORT_FORMATS)
def test_large_export_is_streamed(large: Path, export_format: ExportFormat) -> None:
    tracemalloc.start()
    size = num_chunks = 0
    for chunk in export(LogReader(large), Selection(comparison_ids=("c",)), export_format).chunks:
        size += len(chunk)
        num_chunks += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_chunks >= 2
    assert peak < 1_500_000
    assert size > 100_000


def test_stream_may_hop_threads_and_sees_one_moment(large: Path, tmp_path: Path) -> None:
    """A web server draws each chunk from another thread, and the log goes on meanwhile."""
    file = export(LogReader(large), Selection(comparison_ids=("c",)), "json")
    chunks: list[bytes] = [next(file.chunks)]
    with Recorder(large) as recorder:
        recorder.start_run("later", "c", make_request(), make_info())
        assert recorder.flush(10)
        while True:
            before = len(chunks)
            thread = threading.Thread(target=lambda: chunks.extend(_next(file.chunks)))
            thread.start()
            thread.join()
            if len(chunks) == before:
                break
    document = json.loads(b"".join(chunks))
    assert [len(run["tokens"]) for run in document["comparisons"][0]["runs"]] == [5000]


def _next(chunks: Any) -> list[bytes]:
    chunk = next(chunks, None)
    return [] if chunk is None else [chunk]


def test_stream_that_is_left_early_frees_the_log(large: Path) -> None:
    chunks = export(LogReader(large), Selection(comparison_ids=("c",)), "jsonl").chunks
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    db = open_for_writing(large)
    # A reader that is still there would keep the log's write-ahead file from being emptied.
    assert db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)
    db.close()
