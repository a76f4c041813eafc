"""Runs the benchmark: every prompt in all modes in turn (A B C A B C), so paired runs lie close in time."""

import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from saguaro_core.config import GenerationRequest, Message, Mode, SamplingParams, SpeculationConfig
from saguaro_core.errors import SaguaroError
from saguaro_core.events import Event, Notice, RunFinished
from saguaro_core.prompts import WARM_UP, BenchPrompt
from saguaro_core.run_figures import RunFigures

NUM_WARM_UP_TOKENS = 32


class DecodingEngine(Protocol):
    """What the benchmark uses of the engine's client."""

    def submit(self, run_id: str, request: GenerationRequest, on_event: Callable[[Event], None]) -> None: ...
    def stop(self, run_id: str) -> None: ...


class RunFailedError(SaguaroError):
    """A run of the benchmark did not finish, so there is nothing to compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What is measured: each prompt in each mode, `repeats` times over."""

    modes: tuple[Mode, ...]
    prompts: tuple[BenchPrompt, ...]
    repeats: int
    sampling: SamplingParams
    speculation: SpeculationConfig

    @property
    def num_runs(self) -> int:
        return self.repeats * len(self.prompts) * len(self.modes)

    def request(self, mode: Mode, prompt: BenchPrompt, max_new_tokens: int | None = None) -> GenerationRequest:
        """The request of one run. Alternatives are left out: nobody looks at them here."""
        cap = self.sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
        return GenerationRequest(
            messages=(Message(role="user", content=prompt.text),),
            mode=mode,
            sampling=replace(self.sampling, max_new_tokens=cap),
            speculation=self.speculation,
            num_alternatives=0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One finished run of the plan; `prompt` is the prompt's index."""

    mode: Mode
    prompt: int
    repeat: int
    finished: RunFinished
    notices: tuple[str, ...] = ()

    @property
    def figures(self) -> RunFigures:
        return self.finished.figures


def measure(engine: DecodingEngine, plan: BenchPlan) -> Iterator[Measurement]:
    """Warm every mode up once, then yield the plan's runs in order. Raises RunFailedError and SaguaroError."""
    for mode in plan.modes:
        num_tokens = min(NUM_WARM_UP_TOKENS, plan.sampling.max_new_tokens)
        _run(engine, plan.request(mode, WARM_UP, num_tokens), f"the warm-up in mode {mode}")
    for repeat in range(plan.repeats):
        for index, prompt in enumerate(plan.prompts):
            for mode in plan.modes:
                observed = _run(engine, plan.request(mode, prompt), f"prompt {index + 1} in mode {mode}")
                assert observed.finished is not None
                yield Measurement(
                    mode=mode,
                    prompt=index,
                    repeat=repeat,
                    finished=observed.finished,
                    notices=tuple(observed.notices),
                )


@dataclass(slots=True)
class _Observed:
    """Filled on the engine's thread, read once `done` is set."""

    notices: list[str] = field(default_factory=list)
    finished: RunFinished | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def on_event(self, event: Event) -> None:
        if isinstance(event, Notice):
            self.notices.append(event.message)
        elif isinstance(event, RunFinished):
            self.finished = event
            self.done.set()


def _run(engine: DecodingEngine, request: GenerationRequest, name: str) -> _Observed:
    """Run one request to its end; it is stopped if the wait for it is interrupted."""
    run_id, observed = uuid.uuid4().hex, _Observed()
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
