"""The database file: its schema, which files are refused untouched, and what the rest of the world sees in it."""

import ast
import re
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from inspect import ismodule
from pathlib import Path

import pytest
from sqlite_utils import Database
from storage_samples import (
    ROOT,
    TABLES,
    count_rows,
    dump,
    make_events,
    make_info,
    make_request,
    query,
    record_all,
    record_comparison,
)

import storage
from saguaro_core.config import SpeculationConfig
from storage import LogReader, Recorder, RecorderLimits, SchemaRefused, default_database_path
from storage.database import open_for_writing
from storage.migrations import known_steps


@pytest.fixture
def log(tmp_path: Path) -> Path:
    with Recorder(tmp_path / "log.db") as recorder:
        record_comparison(recorder, "c1", modes=("ar", "sd", "ssd"))
        record_comparison(recorder, "c2")
    return tmp_path / "log.db"


def test_new_file_has_the_tables_wal_and_foreign_keys(tmp_path: Path) -> None:
    db = open_for_writing(tmp_path / "new folder" / "lo?g #1.db")
    assert set(TABLES) <= set(db.table_names())
    assert set(db.view_names()) == {"run_overview", "comparison_overview"}
    assert db.journal_mode == "wal"
    assert db.execute("PRAGMA foreign_keys").fetchone() == (1,)
    with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
        db.execute("INSERT INTO notices VALUES ('nobody', 0, 'text', 0.0)")
    db.close()
    assert [file.name for file in (tmp_path / "new folder").iterdir()] == ["lo?g #1.db"]


def test_opening_again_changes_nothing(log: Path) -> None:
    before = dump(log)
    open_for_writing(log).close()
    assert dump(log) == before


def test_every_table_of_a_run_goes_with_its_comparison(log: Path) -> None:
    db = open_for_writing(log)
    db.execute("DELETE FROM comparisons WHERE id = 'c1'")
    assert count_rows(log) == {"comparisons": 1, "runs": 1, "rounds": 3, "tokens": 6, "spans": 7, "notices": 1}
    db.vacuum()
    for table in ("comparisons", "runs"):
        assert db.table(table).detect_fts() == f"{table}_fts"
        # Raises when the index and the table disagree.
        db.execute(f"INSERT INTO {table}_fts ({table}_fts, rank) VALUES ('integrity-check', 1)")
    db.close()
    assert [entry.id for entry in LogReader(log).history("cacti").entries] == ["c2"]


def test_invalid_json_is_refused_by_the_file_itself(log: Path) -> None:
    db = open_for_writing(log)
    for table, column in [
        ("runs", "settings"),
        ("runs", "figures"),
        ("rounds", "prepared"),
        ("tokens", "alternatives"),
    ]:
        with pytest.raises(sqlite3.IntegrityError, match="json_valid"):
            db.execute(f"UPDATE {table} SET {column} = '[NaN'")
    db.close()


def _change_to_newer(path: Path) -> None:
    db = open_for_writing(path)
    db.table("_sqlite_migrations").insert(
        {"migration_set": "saguaro", "name": "m999_wonders", "applied_at": "2031-01-01"}
    )
    db.close()


def _make_foreign(path: Path) -> None:
    path.unlink()
    db = Database(path)
    db.table("recipes").insert({"name": "soup"})
    db.close()


def _make_text(path: Path) -> None:
    path.write_text("Dear diary, this is no database. " * 200)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_change_to_newer, "newer version .*m999_wonders.*Update this program"),
        (_make_foreign, "belongs to another program .*recipes"),
        (_make_text, "not a SQLite database"),
    ],
)
def test_file_of_a_newer_version_or_of_another_program_is_refused_untouched(
    log: Path, change: Callable[[Path], None], message: str
) -> None:
    change(log)
    before, files = log.read_bytes(), sorted(file.name for file in log.parent.iterdir())
    with pytest.raises(SchemaRefused, match=message):
        Recorder(log)
    with pytest.raises(SchemaRefused, match=message):
        open_for_writing(log)
    assert log.read_bytes() == before
    assert sorted(file.name for file in log.parent.iterdir()) == files


def test_older_file_is_brought_up_to_date_with_its_rows(log: Path) -> None:
    db = open_for_writing(log)
    db.execute("DROP VIEW run_overview")
    db.execute("DROP VIEW comparison_overview")
    db.execute("DELETE FROM _sqlite_migrations WHERE name = 'm004_overviews'")
    db.close()
    rows = count_rows(log)
    open_for_writing(log).close()
    assert count_rows(log) == rows
    assert query(log, "SELECT count(*) FROM run_overview") == [(4,)]


def test_programs_that_start_together_make_one_schema(tmp_path: Path) -> None:
    path, errors = tmp_path / "log.db", []
    barrier = threading.Barrier(8)

    def start_up() -> None:
        barrier.wait()
        try:
            open_for_writing(path, busy_timeout=10).close()
        except Exception as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=start_up) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert query(path, "SELECT name FROM _sqlite_migrations") == [(name,) for name in known_steps()]


def test_file_that_cannot_be_opened_shows_as_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    limits = RecorderLimits(give_up_after=0.2, retry_interval=0.05)
    with Recorder(tmp_path / "file" / "log.db", limits=limits) as recorder:
        assert str(tmp_path / "file" / "log.db") in str(recorder.problem)
        recorder.start_comparison("c", make_request().messages, {})
        recorder.start_run("r", "c", make_request(), make_info())
        record_all(recorder, make_events("r"))
        assert not recorder.wait_saved("r", 10)


def test_default_file_lies_in_the_users_data_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    path = default_database_path()
    assert path.is_absolute()
    assert path.name == "saguaro.db"
    assert tmp_path not in path.parents
    assert ROOT not in path.parents


def test_overviews_compare_finished_runs_only(log: Path) -> None:
    with Recorder(log) as recorder:
        request = make_request()
        recorder.start_comparison("cut", request.messages, {})
        for mode, status in (("ar", "finished"), ("ssd", "stopped")):
            recorder.start_run(f"cut-{mode}", "cut", make_request(mode=mode), make_info())  # type: ignore[arg-type]
            record_all(recorder, make_events(f"cut-{mode}", mode=mode, status=status))  # type: ignore[arg-type]
        assert recorder.flush(10)
    columns = "comparison_id, ssd_over_ar, sd_over_ar, same_tokens, ar_tokens_per_second IS NULL"
    assert query(log, f"SELECT {columns} FROM comparison_overview ORDER BY number") == [
        ("c1", 1.0, 1.0, "yes", 0),
        ("c2", None, None, None, 1),
        ("cut", None, None, None, 0),
    ]
    assert query(
        log, "SELECT mode, status, lookahead, temperature, seed FROM run_overview WHERE run_id = 'cut-ssd'"
    ) == [("ssd", "stopped", SpeculationConfig().lookahead, 0.0, 7)]


def test_documented_schema_is_the_schema(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "database.md").read_text()
    documented = re.search(r"<!-- schema -->\n```sql\n(.*?)\n```\n<!-- /schema -->", text, re.DOTALL)
    assert documented is not None
    db = open_for_writing(tmp_path / "log.db")
    rows = db.query(
        "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE '%\\_fts\\_%' ESCAPE '\\' "
        "AND name NOT LIKE '%sqlite_%' AND type IN ('table', 'index', 'view') ORDER BY rowid"
    )
    schema = "\n".join(f"{row['sql']};" for row in rows)
    db.close()
    assert documented[1] == schema, "put the schema of this test's message into docs/database.md"


def test_documented_queries_run(log: Path) -> None:
    text = (ROOT / "docs" / "database.md").read_text()
    queries = re.findall(r"```sql\n(-- .*?)\n```", text, re.DOTALL)
    assert len(queries) >= 4
    for sql in queries:
        assert query(log, sql), sql


def test_storage_imports_neither_torch_nor_a_page_library() -> None:
    code = "import sys, storage; print(sorted({'torch', 'gradio', 'transformers'} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output == "[]\n"


def test_engine_never_imports_storage() -> None:
    for file in (ROOT / "saguaro_core").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not any(name.split(".")[0] == "storage" for name in names), file


def test_public_names_are_the_listed_ones() -> None:
    public = {name for name, value in vars(storage).items() if not name.startswith("_") and not ismodule(value)}
    assert public == set(storage.__all__)
