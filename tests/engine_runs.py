"""Running requests on a real engine, and keeping everything that a run emitted."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import psutil

from saguaro_core.config import GenerationRequest, Message, Mode, SamplingParams, SpeculationConfig
from saguaro_core.engine import Engine
from saguaro_core.events import Event, Notice, PhaseEvent, RoundEvent, RunFinished, RunStarted, SpanEvent, TokenEvent

E = TypeVar("E", bound=Event)

STORY = "Tell me a long story about a lighthouse keeper, his dog and the sea. Write at least ten paragraphs."
_numbers = itertools.count(1)


@dataclass
class EngineRun:
    """One submitted run; events arrive on the engine client's thread."""

    run_id: str
    events: list[Event] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, event: Event) -> None:
        with self.changed:
            self.arrivals.append(time.monotonic())
            self.events.append(event)
            self.changed.notify_all()

    def wait_until(self, is_met: Callable[[], object], timeout: float = 60.0) -> None:
        with self.changed:
            assert self.changed.wait_for(is_met, timeout), (self.run_id, self.events[-3:])

    def wait_for_tokens(self, count: int, timeout: float = 60.0) -> None:
        """Wait until at least `count` tokens are there and the run still goes on."""
        self.wait_until(lambda: len(self.tokens) >= count or self.is_over, timeout)
        assert not self.is_over, self.events[-1]

    def wait(self, timeout: float = 120.0) -> RunFinished:
        self.wait_until(lambda: self.is_over, timeout)
        return self.finished

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in list(self.events) if isinstance(event, kind)]

    @property
    def is_over(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], RunFinished)

    @property
    def finished(self) -> RunFinished:
        last = self.events[-1]
        assert isinstance(last, RunFinished)
        return last

    @property
    def ids(self) -> tuple[int, ...]:
        return self.finished.token_ids

    @property
    def prompt_ids(self) -> list[int]:
        (started,) = self.of(RunStarted)
        return list(started.prompt_token_ids)

    @property
    def tokens(self) -> list[TokenEvent]:
        return self.of(TokenEvent)

    @property
    def rounds(self) -> list[RoundEvent]:
        return self.of(RoundEvent)

    @property
    def spans(self) -> list[SpanEvent]:
        return self.of(SpanEvent)

    @property
    def phases(self) -> list[PhaseEvent]:
        return self.of(PhaseEvent)

    @property
    def notices(self) -> list[Notice]:
        return self.of(Notice)


def start_run(
    engine: Engine,
    prompt: str,
    mode: Mode,
    sampling: SamplingParams | None = None,
    speculation: SpeculationConfig | None = None,
    *,
    num_alternatives: int = 0,
) -> EngineRun:
    """Submit a request and return at once."""
    run = EngineRun(f"run-{next(_numbers)}-{mode}")
    request = GenerationRequest(
        messages=(Message(role="user", content=prompt),),
        mode=mode,
        sampling=sampling or SamplingParams(),
        speculation=speculation or SpeculationConfig(),
        num_alternatives=num_alternatives,
    )
    engine.submit(run.run_id, request, run.take)
    return run


def start_batch(
    engine: Engine,
    prompts: Sequence[str],
    mode: Mode,
    samplings: Sequence[SamplingParams],
    speculation: SpeculationConfig | None = None,
) -> list[EngineRun]:
    """Submit a batch and return at once; the runs in the order of their prompts."""
    runs = {f"run-{next(_numbers)}-{mode}": prompt for prompt in prompts}
    started = {run_id: EngineRun(run_id) for run_id in runs}
    requests = {
        run_id: GenerationRequest(
            messages=(Message(role="user", content=prompt),),
            mode=mode,
            sampling=sampling,
            speculation=speculation or SpeculationConfig(),
            num_alternatives=0,
        )
        for (run_id, prompt), sampling in zip(runs.items(), samplings, strict=True)
    }
    engine.submit_batch(requests, lambda event: started[event.run_id].take(event))
    return list(started.values())


def run_to_end(
    engine: Engine,
    prompt: str,
    mode: Mode,
    sampling: SamplingParams | None = None,
    speculation: SpeculationConfig | None = None,
    *,
    timeout: float = 120.0,
) -> EngineRun:
    """Run a request to its end, whatever that is."""
    run = start_run(engine, prompt, mode, sampling, speculation)
    run.wait(timeout)
    return run


def greedy(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens)


def draft_process(engine: Engine) -> psutil.Process:
    """The draft process: the engine process's only child."""
    return only_child(engine.process_id())


def only_child(pid: int | None) -> psutil.Process:
    assert pid is not None
    (child,) = psutil.Process(pid).children()
    return child


def wait_until(is_met: Callable[[], object], timeout: float) -> None:
    """Poll a condition that nobody announces."""
    deadline = time.monotonic() + timeout
    while not is_met():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.05)


def is_gone(process: psutil.Process) -> bool:
    """Whether a process has ended: a zombie has, once none of its threads is left that its parent would still wait
    for.
    """
    try:
        if not process.is_running():
            return True
        return bool(process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1)
    except psutil.NoSuchProcess:
        return True
