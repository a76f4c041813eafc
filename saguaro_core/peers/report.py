"""The comparison as plain text and as JSON: one row per peer and number of threads."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from saguaro_core.bench_measure import AR_ALL_CORES
from saguaro_core.bench_table import UNDEFINED, number
from saguaro_core.peers.compare import PeerComparison
from saguaro_core.peers.rows import OwnSpeeds, PeerDifference, PeerRow, median_of, ratios_to

_TITLE_WIDTH, _COLUMN_WIDTH = 30, 14
_HEAD = ("threads", "tokens/s", "to our AR", "to our SSD", "first token, s", "same tokens", "peak MB")
_BASES = ("ar", "ssd")
_OWN_TITLES = {AR_ALL_CORES: "AR, all cores"}


def format_peers(comparison: PeerComparison) -> str:
    """The table, then how each peer was used, where its answers part from ours, and what could not be measured."""
    rows = comparison.rows
    measured = [row for row in rows if row.error is None]
    lines = [_line("Peers, greedy", _HEAD)] if rows else []
    if rows:
        lines += [_own_line(comparison.own, column, comparison.core_sets) for column in comparison.own.speeds]
    lines += [_line(row.title, _cells(row, len(comparison.own.token_ids))) for row in measured]
    lines += _section("how each was used", [_use(row) for row in measured])
    lines += _section("where answers part from ours", [_parting(row) for row in measured if row.differences])
    lines += _section("faster than our SSD", [_ahead(row) for row in measured if row.ratios.get("ssd", 0.0) > 1.0])
    lines += _section("not measured", [f"{_name(row)}: {row.error}" for row in rows if row.error is not None])
    lines += _section("notes", comparison.notes)
    return "\n".join(lines).lstrip("\n") + "\n"


def peers_to_json(comparison: PeerComparison) -> dict[str, Any]:
    """Plain data for --json."""
    return {
        "core_sets": comparison.core_sets,
        "rows": [asdict(row) for row in comparison.rows],
        "notes": comparison.notes,
    }


def _line(title: str, cells: Sequence[str]) -> str:
    widths = [max(_COLUMN_WIDTH, len(head) + 2) for head in _HEAD]
    return (title.ljust(_TITLE_WIDTH) + "".join(c.rjust(w) for c, w in zip(cells, widths, strict=True))).rstrip()


def _megabytes(value: int | None) -> str:
    return UNDEFINED if value is None else f"{value / 1e6:.0f}"


def _own_line(own: OwnSpeeds, column: str, core_sets: Sequence[tuple[int, ...]]) -> str:
    """One of the engine's columns. AR keeps to the target's cores; the draft has the rest."""
    num_target, num_all = len(core_sets[0]), len(core_sets[-1])
    together = f"{num_target}+{num_all - num_target}" if num_all > num_target else str(num_all)
    threads = {"ar": str(num_target), AR_ALL_CORES: str(num_all)}.get(column, together)
    speeds = own.speeds[column]
    ratios = (number(ratios_to(own, speeds).get(base), 2) for base in _BASES)
    first_token = number(own.first_tokens[column], 2)
    memory = _megabytes(own.peak_memory_bytes) if column != AR_ALL_CORES else ""
    cells = [threads, number(median_of(speeds.values()), 1), *ratios, first_token, "", memory]
    return _line(f"this engine, {_OWN_TITLES.get(column, column.upper())}", cells)


def _cells(row: PeerRow, num_prompts: int) -> list[str]:
    differing = len(row.differences or ())
    return [
        str(row.num_threads),
        number(row.decode_tokens_per_second, 1),
        *(number(row.ratios.get(base), 2) for base in _BASES),
        number(row.time_to_first_token, 2),
        "yes" if not differing else f"{num_prompts - differing} of {num_prompts}",
        _megabytes(row.peak_memory_bytes),
    ]


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"{title}:", *(f"  {line}" for line in lines)] if lines else []


def _name(row: PeerRow) -> str:
    if row.num_threads == 0:
        return row.title
    return f"{row.title}, {row.num_threads} thread" + ("s" if row.num_threads > 1 else "")


def _use(row: PeerRow) -> str:
    tried = [f"{name} {speed:.1f}" for name, speed in row.tried.items()]
    details = [f"tokens/s of what was tried: {'; '.join(tried)}"] if len(tried) > 1 else []
    return "\n    ".join([f"{_name(row)}: {row.version}, {row.how}", *details, *row.notes])


def _parting(row: PeerRow) -> str:
    assert row.differences
    first = min(row.differences, key=lambda difference: difference.index)
    count = f"{len(row.differences)} of {len(row.answers)}"
    where = f"{_name(row)}: {count}, the earliest after {first.index} tokens of prompt {first.prompt + 1}"
    return f"{where}\n    {_why(row, first)}"


def _why(row: PeerRow, difference: PeerDifference) -> str:
    ours, theirs = ("the end" if i is None else f"token {i}" for i in difference.token_ids)
    texts = f"{row.arithmetic}; ours {ours}, theirs {theirs}"
    if difference.gap is None:
        return texts
    side = "ours" if difference.gap >= 0 else "theirs"
    return f"{texts}, {abs(difference.gap):.4f} apart in float32, {side} ahead"


def _ahead(row: PeerRow) -> str:
    return f"{_name(row)}: {row.ratios['ssd']:.2f} times as fast, with {row.arithmetic}"
