"""A benchmark's JSON file as plain data: figures per pair of runs, and pooled ones."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from saguaro_core.config import MODES, Mode, SpeculationConfig
from saguaro_core.errors import InvalidRequest
from saguaro_core.run_figures import RunFigures

Pair = Mapping[Mode, RunFigures]


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """What a benchmark's file says: figures by (prompt, repeat) and mode, and how speculation was set."""

    pairs: Mapping[tuple[int, int], Pair]
    speculation: SpeculationConfig

    @property
    def pooled(self) -> Pair:
        """One set of figures per mode: counts summed, all else averaged over the runs."""
        modes = dict.fromkeys(mode for pair in self.pairs.values() for mode in pair)
        return {mode: _pool([pair[mode] for pair in self.pairs.values() if mode in pair]) for mode in modes}


def read_benchmark(path: Path) -> Benchmark:
    """Read what `python -m saguaro_core.bench --json FILE` wrote. Raises ValueError that says what is wrong."""
    try:
        benchmark = _benchmark(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, InvalidRequest) as error:
        raise ValueError(
            f"file {str(path)!r} cannot be used ({error}): write one with python -m saguaro_core.bench --json FILE."
        ) from error
    if not benchmark.pairs:
        raise ValueError(f"file {str(path)!r} holds no runs: write one with python -m saguaro_core.bench --json FILE.")
    return benchmark


def _benchmark(data: Mapping[str, Any]) -> Benchmark:
    pairs: dict[tuple[int, int], dict[Mode, RunFigures]] = {}
    for run in data["runs"]:
        # A column beside the modes is one of them under other conditions, AR with all cores say: not the pair's own.
        column = run.get("column", run["mode"])
        if column in MODES:
            figures = msgspec.convert(run["figures"], RunFigures)
            pairs.setdefault((run["prompt"], run["repeat"]), {})[column] = figures
    return Benchmark(pairs=pairs, speculation=SpeculationConfig.from_mapping(_known(data["settings"]["speculation"])))


def _known(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A file of a later version may hold settings that do not matter here."""
    names = {f.name for f in fields(SpeculationConfig)}
    return {name: value for name, value in settings.items() if name in names}


def _pool(runs: Sequence[RunFigures]) -> RunFigures:
    pooled = {}
    for f in fields(RunFigures):
        values = [value for run in runs if (value := getattr(run, f.name)) is not None]
        if f.name.startswith("num_") and f.name != "num_devices":
            pooled[f.name] = sum(values)
        elif f.name != "acceptance_histogram" and values:
            pooled[f.name] = fmean(values)
    figures = replace(RunFigures(), **pooled)
    steps, cached = figures.num_spec_steps, figures.num_cache_hits + figures.num_cache_misses
    return replace(
        figures,
        num_devices=round(figures.num_devices),
        mean_acceptance_length=1 + figures.num_accepted_draft_tokens / steps if steps else None,
        cache_hit_rate=figures.num_cache_hits / cached if cached else None,
        mean_acceptance_length_hit=_weighted(runs, "mean_acceptance_length_hit", "num_cache_hits"),
        mean_acceptance_length_miss=_weighted(runs, "mean_acceptance_length_miss", "num_cache_misses"),
    )


def _weighted(runs: Sequence[RunFigures], name: str, weight: str) -> float | None:
    known = [(value, getattr(run, weight)) for run in runs if (value := getattr(run, name)) is not None]
    total = sum(count for _, count in known)
    return sum(value * count for value, count in known) / total if total else None
