"""Where the time of a stretch of work goes: functions timed from outside, each without what it calls.

`instrument` puts a timer around methods of classes, in a process that exists to be profiled; the code that is timed
knows nothing of it. At any moment the time runs for one label, so the labels add up to the whole.
"""

import inspect
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from functools import wraps
from types import ModuleType
from typing import Any

REST = "the rest"


@dataclass(frozen=True, slots=True)
class Section:
    """A method of a class, or a function of a module that looks it up by name, and the label that its own time counts
    under. What an opaque section calls counts under its label.
    """

    owner: type | ModuleType
    method: str
    label: str
    is_opaque: bool = False


@dataclass(slots=True)
class Total:
    """Seconds under one label, and how often it was entered."""

    seconds: float = 0.0
    calls: int = 0


@dataclass(slots=True)
class SectionClock:
    """Sums the time under each label between start and stop; outside of them the timers only pass calls on."""

    clock: Callable[[], float] = time.perf_counter
    totals: dict[str, Total] = field(default_factory=dict)
    forwards: dict[int, Total] = field(default_factory=dict)
    _is_on: bool = False
    _is_opaque: bool = False
    _label: str = REST
    _since: float = 0.0
    _asking: str | None = None

    def start(self) -> None:
        """Forget what was summed and begin."""
        self.totals, self.forwards = {REST: Total(calls=1)}, {}
        self._label, self._asking, self._since, self._is_on = REST, None, self.clock(), True

    def stop(self) -> None:
        """Sum no more."""
        if self._is_on:
            self._switch(REST)
            self._is_on = False

    def timed(self, function: Callable[..., Any], label: str, is_opaque: bool = False) -> Callable[..., Any]:
        """The function with a timer around it; a generator function is timed while it runs, not while it is
        suspended.
        """
        if inspect.isgeneratorfunction(function):
            return self._timed_steps(function, label)

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self._is_on or self._is_opaque:
                return function(*args, **kwargs)
            before = self._enter(label)
            self._is_opaque = is_opaque
            try:
                return function(*args, **kwargs)
            finally:
                self._is_opaque = False
                self._switch(before)

        return timed

    def timed_forward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Around a runner's forward: counted under whichever suspended work asked for it, and by its rows."""

        @wraps(function)
        def timed(runner: Any, batch: Any) -> Any:
            if not self._is_on:
                return function(runner, batch)
            asking, self._asking = self._asking, None
            started, before = self.clock(), self._enter("forward" if asking is None else f"{asking}: forward")
            try:
                return function(runner, batch)
            finally:
                self._switch(before)
                total = self.forwards.setdefault(batch.token_ids.shape[-1], Total())
                total.seconds += self._since - started
                total.calls += 1

        return timed

    def timed_parts(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same around a forward in parts; what happens between them is not its time."""

        @wraps(function)
        def timed(runner: Any, batch: Any) -> Generator[Any, Any, Any]:
            asking, self._asking = self._asking, None
            parts, seconds = function(runner, batch), 0.0
            while True:
                started, before = self.clock(), self._enter("forward" if asking is None else f"{asking}: forward")
                try:
                    next(parts)
                except StopIteration as end:
                    seconds += self.clock() - started
                    total = self.forwards.setdefault(batch.token_ids.shape[-1], Total())
                    total.seconds += seconds
                    total.calls += 1
                    return end.value
                finally:
                    self._switch(before)
                seconds += self._since - started
                yield

        return timed

    def _timed_steps(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            steps, sent = function(*args, **kwargs), None
            while True:
                before = self._enter(label) if self._is_on else None
                try:
                    wanted = steps.send(sent)
                except StopIteration as end:
                    return end.value
                finally:
                    if before is not None and self._is_on:
                        self._switch(before)
                # The innermost of nested works names what comes next.
                self._asking = self._asking or label
                sent = yield wanted

        return timed

    def _enter(self, label: str) -> str:
        before = self._label
        self._switch(label)
        self.totals.setdefault(label, Total()).calls += 1
        return before

    def _switch(self, label: str) -> None:
        now = self.clock()
        total = self.totals.setdefault(self._label, Total())
        total.seconds += now - self._since
        self._label, self._since = label, now


def instrument(clock: SectionClock, sections: Iterable[Section]) -> None:
    """Time the methods from now on, in the whole process."""
    for section in sections:
        method = getattr(section.owner, section.method)
        setattr(section.owner, section.method, clock.timed(method, section.label, section.is_opaque))
