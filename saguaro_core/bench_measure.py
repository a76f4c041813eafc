"""Runs the benchmark: every prompt in all columns in turn (A B C A B C), so paired runs lie close in time.

A column is a mode, or AR once more in an engine whose target has all the cores.
"""

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from saguaro_core.config import GenerationRequest, Message, Mode, SamplingParams, SpeculationConfig
from saguaro_core.errors import SaguaroError
from saguaro_core.events import Event, Notice, RoundEvent, RunFinished, SpanEvent
from saguaro_core.prompts import WARM_UP, BenchPrompt
from saguaro_core.run_figures import RunFigures

NUM_WARM_UP_TOKENS = 32
AR_ALL_CORES = "ar_all_cores"


class DecodingEngine(Protocol):
    """What the benchmark uses of the engine's client."""

    def submit(self, run_id: str, request: GenerationRequest, on_event: Callable[[Event], None]) -> None: ...
    def stop(self, run_id: str) -> None: ...


class RunFailedError(SaguaroError):
    """A run of the benchmark did not finish, so there is nothing to compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What is measured: each prompt in each column, `repeats` times over."""

    modes: tuple[Mode, ...]
    prompts: tuple[BenchPrompt, ...]
    repeats: int
    sampling: SamplingParams
    speculation: SpeculationConfig
    ar_all_cores: bool = False

    @property
    def columns(self) -> dict[str, Mode]:
        """The mode that each column runs, in order."""
        columns: dict[str, Mode] = {mode: mode for mode in self.modes}
        return columns | {AR_ALL_CORES: "ar"} if self.ar_all_cores else columns

    @property
    def num_runs(self) -> int:
        return self.repeats * len(self.prompts) * len(self.columns)

    def request(self, mode: Mode, prompt: BenchPrompt, max_new_tokens: int | None = None) -> GenerationRequest:
        """The request of one run. Alternatives are left out: nobody looks at them here. Every run reads its whole
        prompt, so that first tokens compare.
        """
        cap = self.sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
        return GenerationRequest(
            messages=(Message(role="user", content=prompt.text),),
            mode=mode,
            sampling=replace(self.sampling, max_new_tokens=cap),
            speculation=self.speculation,
            num_alternatives=0,
            reuse_prefix=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One finished run of the plan; `prompt` is the prompt's index."""

    mode: Mode
    column: str
    prompt: int
    repeat: int
    finished: RunFinished
    notices: tuple[str, ...] = ()
    rounds: tuple[RoundEvent, ...] = ()
    spans: tuple[SpanEvent, ...] = ()

    @property
    def figures(self) -> RunFigures:
        return self.finished.figures


def measure(engines: Mapping[str, DecodingEngine], plan: BenchPlan) -> Iterator[Measurement]:
    """Warm every column up once, then yield the plan's runs in order; `engines` has the engine of each column.

    Raises RunFailedError and SaguaroError.
    """
    for column, mode in plan.columns.items():
        num_tokens = min(NUM_WARM_UP_TOKENS, plan.sampling.max_new_tokens)
        run(engines[column], plan.request(mode, WARM_UP, num_tokens), f"the warm-up in mode {column}")
    for repeat in range(plan.repeats):
        for index, prompt in enumerate(plan.prompts):
            for column, mode in plan.columns.items():
                observed = run(engines[column], plan.request(mode, prompt), f"prompt {index + 1} in mode {column}")
                yield observed.measurement(mode, column, index, repeat)


@dataclass(slots=True)
class ObservedRun:
    """What a run emitted: filled on the engine's thread, read once `done` is set."""

    notices: list[str] = field(default_factory=list)
    rounds: list[RoundEvent] = field(default_factory=list)
    spans: list[SpanEvent] = field(default_factory=list)
    finished: RunFinished | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def on_event(self, event: Event) -> None:
        """Keep what the figures need."""
        match event:
            case Notice():
                self.notices.append(event.message)
            case RoundEvent():
                self.rounds.append(event)
            case SpanEvent():
                self.spans.append(event)
            case RunFinished():
                self.finished = event
                self.done.set()

    def measurement(self, mode: Mode, column: str, prompt: int, repeat: int) -> Measurement:
        """The finished run under its place in the plan."""
        assert self.finished is not None
        return Measurement(
            mode=mode,
            column=column,
            prompt=prompt,
            repeat=repeat,
            finished=self.finished,
            notices=tuple(self.notices),
            rounds=tuple(self.rounds),
            spans=tuple(self.spans),
        )


def run(engine: DecodingEngine, request: GenerationRequest, name: str) -> ObservedRun:
    """Run one request to its end; it is stopped if the wait for it is interrupted. Raises RunFailedError."""
    run_id, observed = uuid.uuid4().hex, ObservedRun()
    engine.submit(run_id, request, observed.on_event)
    try:
        observed.done.wait()
    except BaseException:
        engine.stop(run_id)
        raise
    finished = observed.finished
    if finished is None or finished.status != "finished":
        status = "ended without a result" if finished is None else finished.status
        reason = finished.error if finished is not None and finished.error else "no reason was given"
        raise RunFailedError(f"{name} {status}: {reason}")
    return observed
