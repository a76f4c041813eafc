"""The rows of a check's table, and the table itself."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Result = Literal["passed", "failed", "skipped", "measured"]
Data = Mapping[str, float | int | str | None]


@dataclass(frozen=True, slots=True)
class Row:
    """One line: what was checked, how it ended, and what was seen; `data` holds its numbers for machines."""

    check: str
    result: Result
    detail: str
    data: Data = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setting:
    """Where checks run. `devices` are those to use, the draft's last; `is_tiny` means small models and few runs."""

    devices: tuple[str, ...]
    is_tiny: bool = False

    @property
    def first(self) -> str:
        """The target's device."""
        return self.devices[0]

    @property
    def last(self) -> str:
        """The draft's device: the second one, or the only one."""
        return self.devices[min(1, len(self.devices) - 1)]

    @property
    def is_cuda(self) -> bool:
        """Whether GPUs are used; a CPU only stands in for them."""
        return self.first.startswith("cuda")

    @property
    def places(self) -> str:
        """How tables name the two models' places."""
        if self.first == self.last:
            return f"both models share {self.first}"
        return f"target on {self.first}, draft on {self.last}"


class Problems:
    """Collects what is wrong while a check goes on; the row is then `failed` and says all of it."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def expect(self, condition: bool, problem: str) -> None:
        """Note a problem unless the condition holds."""
        if not condition:
            self.found.append(problem)

    def row(self, check: str, detail: str, data: Data | None = None) -> Row:
        """The check's row: passed with its detail, or failed with the problems before it."""
        if not self.found:
            return Row(check, "passed", detail, data or {})
        return Row(check, "failed", "; ".join([*self.found, detail]), data or {})


@contextmanager
def reported_in(rows: list[Row], check: str) -> Iterator[None]:
    """An exception becomes a failed row, so that what comes after still runs."""
    try:
        yield
    except Exception as error:
        rows.append(Row(check, "failed", _one_line(f"{type(error).__name__}: {error}")))


def _one_line(text: str, limit: int = 300) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."


def format_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table whose columns are aligned."""
    header = ("check", "result", "detail")
    lines = [header, *((row.check, row.result, row.detail.replace("|", "/")) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(2)]

    def show(cells: tuple[str, str, str]) -> str:
        return f"| {cells[0].ljust(widths[0])} | {cells[1].ljust(widths[1])} | {cells[2]} |"

    ruler = f"| {'-' * widths[0]} | {'-' * widths[1]} | {'-' * len(header[2])} |"
    return "\n".join([show(header), ruler, *map(show, lines[1:])]) + "\n"
