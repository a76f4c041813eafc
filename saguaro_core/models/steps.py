"""Work that needs forwards on its way, written as a generator: it yields each batch and is sent its logits.

One such piece of work is driven by a runner; several are driven together, a forward for each of them at a time. A
Job is a piece of work that can be left between two parts of a forward.
"""

from collections.abc import Callable, Generator, Mapping
from typing import Generic, TypeVar

from torch import Tensor

from saguaro_core.models.rows import forward_together
from saguaro_core.models.runner import DivisibleRunner, ForwardBatch, Parts, Runner

T = TypeVar("T")
Steps = Generator[ForwardBatch, Tensor | None, T]


def drive(runner: Runner, steps: Steps[T]) -> T:
    """Make every forward that the work asks for; what it returns."""
    logits: Tensor | None = None
    while True:
        try:
            batch = steps.send(logits)
        except StopIteration as end:
            result: T = end.value
            return result
        logits = runner.forward(batch)


class Job(Generic[T]):
    """One piece of work over a runner, to be gone on with, finished or dropped. Nothing that a dropped forward has
    written counts: the work records what it did after its forwards only.
    """

    def __init__(self, runner: Runner, steps: Steps[T]) -> None:
        self._runner, self._steps = runner, steps
        self._logits: Tensor | None = None
        self._parts: Parts | None = None
        self._num_parts_done = 0

    @property
    def share_done(self) -> float:
        """How much of the forward under way is done, 0 to 1."""
        return self._num_parts_done / self._runner.num_parts if isinstance(self._runner, DivisibleRunner) else 0.0

    def go_on(self, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Work until all is done, or until `is_wanted`, asked after every part of a forward, says no; whether all is
        done.
        """
        while True:
            if self._parts is not None and not self._finish_forward(self._parts, is_wanted):
                return False
            try:
                batch = self._steps.send(self._logits)
            except StopIteration:
                return True
            if isinstance(self._runner, DivisibleRunner):
                self._parts, self._num_parts_done = self._runner.forward_in_parts(batch), 0
            else:
                self._logits = self._runner.forward(batch)

    def _finish_forward(self, parts: Parts, is_wanted: Callable[[], bool]) -> bool:
        while True:
            try:
                next(parts)
            except StopIteration as end:
                self._logits, self._parts, self._num_parts_done = end.value, None, 0
                return True
            self._num_parts_done += 1
            if not is_wanted():
                return False

    def drop(self) -> None:
        """Leave the work as it is."""
        if self._parts is not None:
            self._parts.close()
        self._steps.close()


def drive_together(runner: Runner, works: Mapping[int, Steps[T]]) -> dict[int, T | Exception]:
    """Drive works keyed by their cache rows, with one forward for all that want one; what each returns or raises."""
    results: dict[int, T | Exception] = {}
    answers: dict[int, Tensor | None] = dict.fromkeys(works)
    while answers:
        wanted: dict[int, ForwardBatch] = {}
        for row, logits in answers.items():
            try:
                wanted[row] = works[row].send(logits)
            except StopIteration as end:
                results[row] = end.value
            except Exception as error:
                results[row] = error
        made = forward_together(runner, list(wanted.values()), list(wanted)) if wanted else ()
        answers = dict(zip(wanted, made, strict=True))
    return results
