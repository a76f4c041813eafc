"""What is done about runs whose program ended before they did."""

# ruff: noqa: S608 (statements are put together from our own names; values are always parameters)

from collections.abc import Sequence
from pathlib import Path

from sqlite_utils import Database

from saguaro_core.events import Event
from saguaro_core.figures import FiguresAccumulator
from storage import rows
from storage.database import transaction
from storage.ownership import is_dead
from storage.tables import rows_of_run

INTERRUPTED = "The program ended before this run did; the rows up to its last commit are kept."


class RunGone(ValueError):
    """The run's own row is no longer in the log."""


def update_run(db: Database, run_id: str, columns: rows.Row) -> None:
    """Set columns of a run. Raises RunGone when there is no such row."""
    changes = ", ".join(f"{name} = :{name}" for name in columns)
    cursor = db.execute(f"UPDATE runs SET {changes} WHERE id = :run_id", {**columns, "run_id": run_id})
    if cursor.rowcount == 0:
        raise RunGone(f"the run {run_id} is no longer in the log")


def interrupt_dead_runs(db: Database, path: Path, own_name: str) -> None:
    """Mark the running runs of processes that are gone; those of live ones, here or elsewhere, stay."""
    owners = [row["owner"] for row in db.query("SELECT DISTINCT owner FROM runs WHERE status = 'running'")]
    interrupt_runs(db, [owner for owner in owners if owner != own_name and is_dead(path, owner)])


def interrupt_runs(db: Database, owners: Sequence[str]) -> None:
    """Mark the running runs of these owners as interrupted."""
    query = "SELECT id, mode, engine FROM runs WHERE status = 'running' AND owner = ?"
    if not owners:
        return
    with transaction(db):
        for owner in owners:
            for row in list(db.query(query, (owner,))):
                _interrupt_run(db, row)


def _interrupt_run(db: Database, row: rows.Row) -> None:
    """The answer and the figures of a cut run are what its stored rows say."""
    run_id = row["id"]
    tokens = [rows.token_event(token) for token in rows_of_run(db, "tokens", run_id)]
    rounds = [rows.round_event(stored) for stored in rows_of_run(db, "rounds", run_id)]
    spans = [rows.span_event(span) for span in rows_of_run(db, "spans", run_id)]
    accumulator = FiguresAccumulator(row["mode"], num_devices=rows.decode_row(row)["engine"]["num_devices"])
    events: list[Event] = [*rounds, *spans, *tokens]
    for event in events:
        accumulator.add(event)
    last_seen = max([token.time for token in tokens] + [span.end for span in spans], default=0.0)
    columns: rows.Row = {
        "status": "interrupted",
        "error": INTERRUPTED,
        "answer": "".join(token.text for token in tokens),
        "answer_token_ids": rows.json_text([token.token_id for token in tokens]),
        **rows.figure_columns(accumulator.figures(last_seen)),
    }
    update_run(db, run_id, columns)
