"""A function over static tensors which, on CUDA, is captured once as a graph and then launched whole."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

_WARM_UPS = 3


class Captured(Generic[T]):
    """Calls a function without arguments; once captured, replays it into the same outputs."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: list[T] = []

    def capture(self, stream: torch.cuda.Stream, pool: Any) -> None:
        """Record the function on a side stream, after running it there: running it again must change nothing."""
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._function()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Another thread of the process may allocate meanwhile: that is no fault of this capture.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                outputs = self._function()
        finally:
            torch.cuda.set_stream(current)  # A capture that fails leaves the side stream set.
        self._graph, self._outputs = graph, [outputs]

    def __call__(self) -> T:
        """What the function returns; a graph's outputs are overwritten by the next call."""
        if self._graph is None:
            return self._function()
        self._graph.replay()
        return self._outputs[0]
