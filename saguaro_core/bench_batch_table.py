"""The report on batches as plain text: one block of rows for each batch size."""

from collections.abc import Callable

from saguaro_core.bench_batch_report import BatchFigures, BatchReport, Column, SizeReport
from saguaro_core.bench_table import UNDEFINED

_NAMES: dict[Column, str] = {"ar": "AR", "sd": "SD", "ssd_neural": "SSD, neural", "ssd_fast": "SSD, fast"}
_FIGURES: tuple[tuple[str, Callable[[BatchFigures], float | None], str], ...] = (
    ("tok/s, all", lambda f: f.tokens_per_second, ".1f"),
    ("tok/s, each", lambda f: f.tokens_per_second_each, ".1f"),
    ("round ms", lambda f: f.round_ms, ".1f"),
    ("verify ms", lambda f: f.verify_ms, ".1f"),
    ("wait ms", lambda f: f.wait_ms, ".1f"),
    ("hit rate", lambda f: f.cache_hit_rate, ".0%"),
    ("all hit", lambda f: f.all_hit_rate, ".0%"),
    ("p^b", lambda f: f.predicted_all_hit_rate, ".0%"),
)
_WIDTH = 12


def format_batches(report: BatchReport) -> str:
    """The table, b* measured and predicted, and whether the tokens are the same."""
    heads = ["b", "mode", *(label for label, _, _ in _FIGURES), "to AR", "to SD"]
    lines = [_line(heads)]
    for size in report.sizes:
        lines += [_line(_cells(size, column)) for column in size.columns]
    lines += ["", "fast over neural fallback, by batch size (predicted by Theorem 17 from that size's own figures):"]
    for size in report.sizes:
        measured = _number(size.ratios["ssd_fast_over_ssd_neural"], ".2f")
        lines.append(f"  b = {size.size}: {measured} ({_number(size.predicted_fast_over_neural, '.2f')})")
    sizes = ", ".join(str(size.size) for size in report.sizes)
    lines.append(f"b*, measured among {sizes}: {_batch(report.measured_critical_batch)}")
    lines.append(
        f"b*, predicted from b = {min(s.size for s in report.sizes)}: {_batch(report.predicted_critical_batch)}"
    )
    lines.append(f"same tokens: {'yes' if report.same_tokens else 'no'}")
    return "\n".join([*lines, *(f"  {note}" for note in report.notes)]) + "\n"


def _cells(size: SizeReport, column: Column) -> list[str]:
    figures = size.columns[column]
    ratios = [_ratio(size, column, base) for base in ("ar", "sd")]
    return [str(size.size), _NAMES[column], *(_number(get(figures), form) for _, get, form in _FIGURES), *ratios]


def _ratio(size: SizeReport, column: Column, base: str) -> str:
    if column == base:
        return "1.00"
    name = f"{column}_over_{base}"
    return _number(size.ratios[name], ".2f") if name in size.ratios else ""


def _line(cells: list[str]) -> str:
    return (cells[0].rjust(3) + "  " + cells[1].ljust(_WIDTH) + "".join(c.rjust(_WIDTH) for c in cells[2:])).rstrip()


def _number(value: float | None, form: str) -> str:
    return UNDEFINED if value is None else format(value, form)


def _batch(size: int | None) -> str:
    return "the fast fallback never wins" if size is None else str(size)
