"""Plain-text tables for the simulator's command line."""

from collections.abc import Sequence

Cell = str | float | int | None


def table(header: Sequence[str], rows: Sequence[Sequence[Cell]], digits: int = 2) -> str:
    """Columns as wide as their longest cell: text to the left, numbers to the right, None as "n/a"."""
    shown = [[_show(cell, digits) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [header, *shown]) for i in range(len(header))]
    lines = [_line(header, widths), _line(["-" * width for width in widths], widths)]
    return "\n".join([*lines, *(_line(row, widths) for row in shown)]) + "\n"


def relative(value: float | None, base: float | None) -> str:
    """How far a value lies from its base, as a signed percentage."""
    # Adding 0.0 turns a rounded -0.0 into 0.0.
    return "n/a" if value is None or not base else f"{round(value / base - 1.0, 3) + 0.0:+.1%}"


def percent(value: float | None) -> str:
    """A share; "n/a" where it is not defined."""
    return "n/a" if value is None else f"{value:.0%}"


def _show(cell: Cell, digits: int) -> str:
    if cell is None:
        return "n/a"
    return f"{cell:.{digits}f}" if isinstance(cell, float) else str(cell)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.ljust(width) if i == 0 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *rest]).rstrip()
