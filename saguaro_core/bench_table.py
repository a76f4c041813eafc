"""The benchmark's report as plain text: one column for each mode, one row for each figure."""

from collections.abc import Callable, Sequence
from functools import partial

from saguaro_core.bench_measure import AR_ALL_CORES
from saguaro_core.bench_report import BenchReport, Difference, ModeSummary, RatioSummary
from saguaro_core.bench_rounds import WAIT_MS

UNDEFINED = "n/a"
MAX_LISTED = 10
_LABEL_WIDTH, _COLUMN_WIDTH = 26, 20

Show = Callable[[float | None], str]


def format_report(report: BenchReport) -> str:
    """The table, then whether the tokens are the same and what else must be known."""
    modes = list(report.modes)
    rows = [("", [_name(mode) for mode in modes])]
    rows += [(label, [show(get(report.modes[mode])) for mode in modes]) for label, get, show in _FIGURES]
    for base in ("ar", "sd", AR_ALL_CORES):
        rows += _ratio_rows(report, modes, base)
    width = max(_LABEL_WIDTH, *(len(label) + 2 for label, _ in rows))
    lines = [_line(label, cells, width) for label, cells in rows]
    return "\n".join([*lines, "", *_same_tokens(report), *_listed(report.notes)]) + "\n"


def _name(column: str) -> str:
    return "AR, all cores" if column == AR_ALL_CORES else column.upper()


def _line(label: str, cells: Sequence[str], width: int) -> str:
    return (label.ljust(width) + "".join(cell.rjust(_COLUMN_WIDTH) for cell in cells)).rstrip()


def number(value: float | None, digits: int = 2) -> str:
    """A figure as a cell."""
    return UNDEFINED if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share as a cell."""
    return UNDEFINED if value is None else f"{value:.0%}"


def _number(digits: int) -> Show:
    return partial(number, digits=digits)


_FIGURES: tuple[tuple[str, Callable[[ModeSummary], float | None], Show], ...] = (
    ("tokens/s, median", lambda m: m.decode_tokens_per_second, _number(1)),
    ("tokens/s per device", lambda m: m.tokens_per_second_per_device, _number(1)),
    ("first token, s", lambda m: m.time_to_first_token, _number(2)),
    ("acceptance", lambda m: m.draft_acceptance_rate, percent),
    ("cache hit rate", lambda m: m.cache_hit_rate, percent),
    ("tokens per speculated round", lambda m: m.mean_acceptance_length, _number(2)),
    ("tokens per round, all", lambda m: m.tokens_per_round, _number(2)),
    ("verify, mean ms", lambda m: m.mean_verify_ms, _number(1)),
    ("draft step, mean ms", lambda m: m.mean_step_ms, _number(1)),
    ("cache build, mean ms", lambda m: m.mean_build_ms, _number(1)),
    ("wait for draft, mean ms", lambda m: m.mean_wait_ms, _number(1)),
    ("fallback, mean ms", lambda m: m.mean_fallback_ms, _number(1)),
    ("tokens after a hit", lambda m: m.rounds.tokens_after_hit, _number(2)),
    ("tokens after a miss", lambda m: m.rounds.tokens_after_miss, _number(2)),
    ("wait, hits, median ms", lambda m: m.rounds.median_wait_ms_hit, _number(2)),
    ("wait, misses, median ms", lambda m: m.rounds.median_wait_ms_miss, _number(2)),
    (f"hits that wait > {WAIT_MS:g} ms", lambda m: m.rounds.late_hit_rate, percent),
    ("caches built in time", lambda m: m.rounds.full_build_rate, percent),
    ("build inside verify", lambda m: m.build_overlap, percent),
)


def _ratio_rows(report: BenchReport, modes: Sequence[str], base: str) -> list[tuple[str, list[str]]]:
    if base not in modes:
        return []
    ratios = [report.ratios.get(f"{mode}_over_{base}") for mode in modes]
    measured = ["1.00" if mode == base else _spread(ratio) for mode, ratio in zip(modes, ratios, strict=True)]
    predicted = [_number(2)(ratio.predicted) if ratio else "" for ratio in ratios]
    name = _name(base)
    return [(f"ratio to {name} [quartiles]", measured), (f"ratio to {name}, predicted", predicted)]


def _spread(ratio: RatioSummary | None) -> str:
    if ratio is None:
        return ""
    if ratio.median is None or ratio.quartiles is None:
        return _number(2)(ratio.median)
    return f"{ratio.median:.2f} [{ratio.quartiles[0]:.2f}, {ratio.quartiles[1]:.2f}]"


def _same_tokens(report: BenchReport) -> list[str]:
    if report.same_tokens is None:
        return ["same tokens: n/a (one mode only)"]
    if report.same_tokens:
        return ["same tokens: yes"]
    count = len(report.differences)
    return [f"same tokens: no, {count} answers differ", *_listed([_describe(d) for d in report.differences])]


def _describe(difference: Difference) -> str:
    first, other = ("the end" if i is None else f"token {i}" for i in difference.token_ids)
    names = f"{difference.modes[0]} has {first}, {difference.modes[1]} has {other}"
    return f"prompt {difference.prompt + 1}, repeat {difference.repeat + 1}, at index {difference.index}: {names}"


def _listed(lines: Sequence[str]) -> list[str]:
    more = len(lines) - MAX_LISTED
    return [f"  {line}" for line in lines[:MAX_LISTED]] + ([f"  and {more} more, see --json"] if more > 0 else [])
