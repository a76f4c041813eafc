"""What an export covers: the choice of a user, resolved against the log."""

from dataclasses import dataclass

from sqlite_utils import Database

from storage.errors import NotStored


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Whole comparisons, and single runs (each is exported inside its comparison)."""

    comparison_ids: tuple[str, ...] = ()
    run_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scope:
    """The chosen comparisons, oldest first, each with the ids of its chosen runs."""

    runs: dict[str, tuple[str, ...]]

    @property
    def run_ids(self) -> tuple[str, ...]:
        return tuple(run_id for runs in self.runs.values() for run_id in runs)


def resolve(db: Database, selection: Selection) -> Scope:
    """Look the selection up. Raises NotStored for the first id that the log does not hold."""
    chosen: dict[str, set[str]] = {}
    for run_id in selection.run_ids:
        chosen.setdefault(_comparison_of(db, run_id), set()).add(run_id)
    for comparison_id in selection.comparison_ids:
        chosen.setdefault(comparison_id, set()).update(_run_ids(db, comparison_id))
    numbers = {comparison_id: _number(db, comparison_id) for comparison_id in chosen}
    return Scope(
        {
            comparison_id: tuple(run_id for run_id in _run_ids(db, comparison_id) if run_id in chosen[comparison_id])
            for comparison_id in sorted(chosen, key=numbers.__getitem__)
        }
    )


def _run_ids(db: Database, comparison_id: str) -> list[str]:
    query = "SELECT id FROM runs WHERE comparison_id = ? ORDER BY number"
    return [row["id"] for row in db.query(query, (comparison_id,))]


def _comparison_of(db: Database, run_id: str) -> str:
    for row in db.query("SELECT comparison_id FROM runs WHERE id = ?", (run_id,)):
        return str(row["comparison_id"])
    raise NotStored(f"The log holds no run {run_id!r}. It may have been deleted; look in the history.")


def _number(db: Database, comparison_id: str) -> int:
    for row in db.query("SELECT number FROM comparisons WHERE id = ?", (comparison_id,)):
        return int(row["number"])
    raise NotStored(f"The log holds no comparison {comparison_id!r}. It may have been deleted; look in the history.")
