"""The schema, as steps that are applied once each and never edited: a change is a new step below.

`number` is an explicit rowid: the full-text index refers to it, and VACUUM renumbers rowids that have no
name. Wall-clock times are ISO 8601 text in UTC, columns ending in `_s` are seconds since the run's start. JSON
columns are checked. Rows of a run belong to its clustered key, so that reading a run is one range.
"""

# ruff: noqa: S608 (statements are put together from our own names)

from functools import cache

from sqlite_utils import Database, Migrations

MIGRATION_SET = "saguaro"
migrations = Migrations(MIGRATION_SET)


@cache
def known_steps() -> tuple[str, ...]:
    """Names of the steps that this version can apply, oldest first."""
    return tuple(step.name for step in migrations.pending(Database(memory=True)))


@migrations()
def m001_comparisons_and_runs(db: Database) -> None:
    db.execute("""
CREATE TABLE comparisons (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    title TEXT NOT NULL,
    prompt TEXT NOT NULL,
    messages TEXT NOT NULL CHECK (json_valid(messages)),
    settings TEXT NOT NULL CHECK (json_valid(settings)),
    created_at TEXT NOT NULL
) STRICT""")
    db.execute("""
CREATE TABLE runs (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    comparison_id TEXT NOT NULL REFERENCES comparisons(id) ON DELETE CASCADE,
    mode TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('running', 'finished', 'stopped', 'failed', 'interrupted')),
    stop_reason TEXT,
    error TEXT,
    queued_at TEXT NOT NULL,
    started_at TEXT,
    finished_at TEXT,
    settings TEXT NOT NULL CHECK (json_valid(settings)),
    seed INTEGER NOT NULL,
    target TEXT NOT NULL,
    target_revision TEXT NOT NULL,
    target_dtype TEXT NOT NULL,
    target_device TEXT NOT NULL,
    draft TEXT,
    draft_revision TEXT,
    draft_dtype TEXT,
    draft_device TEXT,
    hardware TEXT NOT NULL,
    versions TEXT NOT NULL CHECK (json_valid(versions)),
    engine TEXT NOT NULL CHECK (json_valid(engine)),
    prompt TEXT,
    prompt_token_ids TEXT CHECK (prompt_token_ids IS NULL OR json_valid(prompt_token_ids)),
    answer TEXT NOT NULL DEFAULT '',
    answer_token_ids TEXT NOT NULL DEFAULT '[]' CHECK (json_valid(answer_token_ids)),
    num_tokens INTEGER,
    elapsed REAL,
    time_to_first_token REAL,
    decode_tokens_per_second REAL,
    tokens_per_second_per_device REAL,
    num_spec_steps INTEGER,
    num_draft_tokens INTEGER,
    num_accepted_draft_tokens INTEGER,
    draft_acceptance_rate REAL,
    mean_acceptance_length REAL,
    cache_hit_rate REAL,
    build_overlap REAL,
    figures TEXT CHECK (figures IS NULL OR json_valid(figures)),
    rows_complete INTEGER NOT NULL DEFAULT 1,
    owner TEXT NOT NULL
) STRICT""")
    db.execute("CREATE INDEX idx_comparisons_created_at ON comparisons(created_at)")
    db.execute("CREATE INDEX idx_runs_comparison_id ON runs(comparison_id)")
    db.execute("CREATE INDEX idx_runs_status_mode ON runs(status, mode)")


@migrations()
def m002_rows_of_a_run(db: Database) -> None:
    db.execute("""
CREATE TABLE rounds (
    run_id TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
    round_index INTEGER NOT NULL,
    drafted INTEGER NOT NULL,
    accepted INTEGER NOT NULL,
    num_committed INTEGER NOT NULL,
    bonus_token_id INTEGER NOT NULL,
    cache TEXT,
    fallback TEXT,
    fan_out TEXT NOT NULL CHECK (json_valid(fan_out)),
    prepared TEXT NOT NULL CHECK (json_valid(prepared)),
    start_s REAL NOT NULL,
    verify_ms REAL NOT NULL,
    draft_ms REAL NOT NULL,
    wait_ms REAL NOT NULL,
    PRIMARY KEY (run_id, round_index)
) STRICT, WITHOUT ROWID""")
    db.execute("""
CREATE TABLE tokens (
    run_id TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
    token_index INTEGER NOT NULL,
    token_id INTEGER NOT NULL,
    text TEXT NOT NULL,
    time_s REAL NOT NULL,
    round_index INTEGER NOT NULL,
    place INTEGER NOT NULL,
    origin TEXT NOT NULL,
    p REAL,
    q REAL,
    alternatives TEXT NOT NULL CHECK (json_valid(alternatives)),
    PRIMARY KEY (run_id, token_index)
) STRICT, WITHOUT ROWID""")
    db.execute("""
CREATE TABLE spans (
    run_id TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
    span_index INTEGER NOT NULL,
    lane TEXT NOT NULL,
    kind TEXT NOT NULL,
    start_s REAL NOT NULL,
    end_s REAL NOT NULL,
    round_index INTEGER,
    PRIMARY KEY (run_id, span_index)
) STRICT, WITHOUT ROWID""")
    db.execute("""
CREATE TABLE notices (
    run_id TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
    notice_index INTEGER NOT NULL,
    message TEXT NOT NULL,
    time_s REAL NOT NULL,
    PRIMARY KEY (run_id, notice_index)
) STRICT, WITHOUT ROWID""")


def _add_search(db: Database, table: str, columns: tuple[str, ...]) -> None:
    """Index columns for full-text search by triggers; trigrams find parts of words in any script, and code."""
    names = ", ".join(columns)
    new = ", ".join(f"new.{column}" for column in columns)
    old = ", ".join(f"old.{column}" for column in columns)
    insert = f"INSERT INTO {table}_fts (rowid, {names}) VALUES (new.number, {new});"
    delete = f"INSERT INTO {table}_fts ({table}_fts, rowid, {names}) VALUES ('delete', old.number, {old});"
    db.execute(
        f"CREATE VIRTUAL TABLE {table}_fts USING FTS5 "
        f"({names}, tokenize='trigram', content=[{table}], content_rowid=number)"
    )
    db.execute(f"CREATE TRIGGER {table}_ai AFTER INSERT ON {table} BEGIN {insert} END")
    db.execute(f"CREATE TRIGGER {table}_ad AFTER DELETE ON {table} BEGIN {delete} END")
    db.execute(f"CREATE TRIGGER {table}_au AFTER UPDATE OF {names} ON {table} BEGIN {delete} {insert} END")


@migrations()
def m003_full_text_search(db: Database) -> None:
    _add_search(db, "comparisons", ("title", "prompt"))
    _add_search(db, "runs", ("answer",))


@migrations()
def m004_overviews(db: Database) -> None:
    db.create_view(
        "run_overview",
        """
SELECT runs.number, runs.queued_at, comparisons.title, runs.mode, runs.status, runs.stop_reason,
    runs.num_tokens, runs.decode_tokens_per_second, runs.time_to_first_token, runs.draft_acceptance_rate,
    runs.mean_acceptance_length, runs.cache_hit_rate, runs.elapsed,
    runs.settings ->> '$.speculation.lookahead' AS lookahead,
    runs.settings ->> '$.sampling.temperature' AS temperature,
    runs.seed, runs.target, runs.draft, runs.target_device, runs.draft_device, runs.hardware,
    runs.answer, runs.id AS run_id, runs.comparison_id
FROM runs JOIN comparisons ON comparisons.id = runs.comparison_id
""".strip(),
    )
    # Only finished runs are compared: a speed-up over a cut or failed run means nothing.
    db.create_view(
        "comparison_overview",
        """
WITH speeds AS (
    SELECT comparison_id, count(*) AS num_finished, count(DISTINCT answer_token_ids) AS num_answers,
        avg(decode_tokens_per_second) FILTER (WHERE mode = 'ar') AS ar,
        avg(decode_tokens_per_second) FILTER (WHERE mode = 'sd') AS sd,
        avg(decode_tokens_per_second) FILTER (WHERE mode = 'ssd') AS ssd
    FROM runs WHERE status = 'finished' GROUP BY comparison_id
)
SELECT comparisons.number, comparisons.created_at, comparisons.title,
    ar AS ar_tokens_per_second, sd AS sd_tokens_per_second, ssd AS ssd_tokens_per_second,
    ssd / ar AS ssd_over_ar, ssd / sd AS ssd_over_sd, sd / ar AS sd_over_ar,
    CASE WHEN num_finished > 1 THEN CASE num_answers WHEN 1 THEN 'yes' ELSE 'no' END END AS same_tokens,
    comparisons.id AS comparison_id
FROM comparisons LEFT JOIN speeds ON speeds.comparison_id = comparisons.id
""".strip(),
    )
