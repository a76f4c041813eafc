"""Measures batches: `b` prompts decoded together in AR, in SD, and in SSD with the neural and with the fast fallback.

Every group of prompts runs in all columns in turn, so paired runs lie close in time.
"""

import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from saguaro_core.bench_batch_report import BatchRun, Column, ObservedRow, batches_to_json, summarise_batches
from saguaro_core.bench_batch_table import format_batches
from saguaro_core.bench_engine import BenchEngine, EngineFactory, require_draft, start_engine, start_pair
from saguaro_core.bench_measure import NUM_WARM_UP_TOKENS, BenchPlan, RunFailedError
from saguaro_core.bench_terminal import say
from saguaro_core.config import EngineConfig, FallbackPolicy, Mode
from saguaro_core.events import Event, RunFinished
from saguaro_core.prompts import BenchPrompt, select_prompts

COLUMNS: Mapping[Column, tuple[Mode, FallbackPolicy]] = {
    "ar": ("ar", "neural"),
    "sd": ("sd", "neural"),
    "ssd_neural": ("ssd", "neural"),
    "ssd_fast": ("ssd", "fast"),
}


def measure_batches(
    plan: BenchPlan, sizes: Sequence[int], config: EngineConfig, make_engine: EngineFactory = start_engine
) -> tuple[str, dict[str, Any]]:
    """The table, and its figures for JSON. Raises SaguaroError."""
    runs: list[BatchRun] = []
    with ExitStack() as stack:
        engine, info = start_pair(stack, config, make_engine)
        require_draft(info, "batches cannot be compared")
        say("warming up", end="")
        for done in _measure(engine, plan, sizes):
            runs.append(done)
            say(f"\rbatch of {done.size}, group {done.group + 1}, {done.column}".ljust(70), end="")
        say("\n")
    report = summarise_batches(runs)
    settings = {"sampling": asdict(plan.sampling), "speculation": asdict(plan.speculation), "repeats": plan.repeats}
    place = {"hardware": info.hardware, "num_devices": info.num_devices, "versions": info.versions}
    return format_batches(report), {**batches_to_json(report), "settings": settings, **place}


def _measure(engine: BenchEngine, plan: BenchPlan, sizes: Sequence[int]) -> Iterator[BatchRun]:
    """Warm every column up once, then every size with as many groups as the plan has prompts for, at least one."""
    prompts = select_prompts(max(len(plan.prompts), *sizes))
    for column in COLUMNS:
        _decode(engine, plan, column, prompts[:1], min(NUM_WARM_UP_TOKENS, plan.sampling.max_new_tokens))
    for repeat in range(plan.repeats):
        for size in sizes:
            num_groups = max(1, len(plan.prompts) // size)
            for group in range(num_groups):
                members = prompts[group * size : (group + 1) * size]
                for column in COLUMNS:
                    rows = _decode(engine, plan, column, members, plan.sampling.max_new_tokens)
                    yield BatchRun(column=column, size=size, group=group + repeat * num_groups, rows=rows)


def _decode(
    engine: BenchEngine, plan: BenchPlan, column: Column, prompts: Sequence[BenchPrompt], cap: int
) -> tuple[ObservedRow, ...]:
    """Decode prompts together; the sequences in their order. Raises RunFailedError."""
    mode, fallback = COLUMNS[column]
    varied = replace(plan, speculation=replace(plan.speculation, fallback=fallback))
    requests = {uuid.uuid4().hex: varied.request(mode, prompt, cap) for prompt in prompts}
    observed = _ObservedBatch(list(requests))
    engine.submit_batch(requests, observed.on_event)
    try:
        observed.done.wait()
    except BaseException:
        for run_id in requests:
            engine.stop(run_id)
        raise
    for index, row in enumerate(observed.rows.values()):
        finished = row.finished
        if finished is None or finished.status != "finished":
            reason = "no result" if finished is None else finished.error or finished.status
            raise RunFailedError(f"sequence {index + 1} of {len(prompts)} in {column} did not finish: {reason}")
    return tuple(observed.rows.values())


class _ObservedBatch:
    """What the sequences of a batch emitted: filled on the engine's thread, read once `done` is set."""

    def __init__(self, run_ids: Sequence[str]) -> None:
        self.rows = {run_id: ObservedRow() for run_id in run_ids}
        self.done = threading.Event()

    def on_event(self, event: Event) -> None:
        self.rows[event.run_id].take(event)
        if isinstance(event, RunFinished) and all(row.finished for row in self.rows.values()):
            self.done.set()
