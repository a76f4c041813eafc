"""Work that needs forwards on its way, written as a generator: it yields each batch and is sent its logits.

One such piece of work is driven by a runner; several are driven together, a forward for each of them at a time.
"""

from collections.abc import Generator, Mapping
from typing import TypeVar

from torch import Tensor

from saguaro_core.models.rows import forward_together
from saguaro_core.models.runner import ForwardBatch, Runner

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
