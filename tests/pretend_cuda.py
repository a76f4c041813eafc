"""A stand-in for CUDA devices on a machine without one: tensors that say they lie on `cuda:0` or `cuda:1`, computed by
the CPU.

It refuses what CUDA refuses: operations on tensors of different devices, and, while a graph is captured, everything
that waits for the host or copies from or to it. A captured graph is replayed operation by operation into the very
tensors that were captured, so a function that kept a number instead of a buffer gives old results here as it would
there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

_COPIES = {"aten::copy_", "aten::_to_copy", "aten::to.device", "aten::to.dtype_layout", "aten::to.other"}
_WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::item"}
_INDEXED = {"aten::index.Tensor", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}


class PretendTensor(Tensor):
    """A tensor on a pretended device; `inner` holds its numbers."""

    inner: Tensor  # type: ignore[assignment]  # torch's own `inner` is a product that nobody asks for here.
    place: torch.device

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> "PretendTensor":
        made: PretendTensor = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("cpu"),
        )
        made.inner, made.place = inner, device
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def cpu(self, memory_format: Any = None) -> Tensor:
        return _to(self, "cpu")

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return torch.tensor(data, dtype=dtype or self.dtype, device=self.place)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where it says it lies. torch's own code is not told, because it would ask the real CUDA."""
        return self.place

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self.place}: {self.inner!r}"


class _Mode(TorchDispatchMode):
    """Sees the calls that no pretended tensor takes part in: those that make one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class PretendGraph:
    """What was done while it captured: functions, their arguments and the tensors that they gave."""

    recording: ClassVar["PretendGraph | None"] = None

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        """Do it again, into the same tensors."""
        assert PretendGraph.recording is None
        for func, args, kwargs, outputs in self.calls:
            held = [_storage(tensor) for tensor in tree_flatten((args, kwargs))[0] if isinstance(tensor, Tensor)]
            again = func(*args, **kwargs)
            for old, new in zip(tree_flatten(outputs)[0], tree_flatten(again)[0], strict=True):
                if isinstance(old, Tensor) and _storage(new) not in held:
                    old.copy_(new)

    @classmethod
    @contextmanager
    def capture(cls, graph: "PretendGraph", **options: Any) -> Iterator[None]:
        """Record into `graph`. Nothing is computed while CUDA captures: outputs are filled with a wrong number."""
        assert options["stream"] is not None and options["pool"] is not None
        cls.recording = graph
        try:
            yield
        finally:
            cls.recording = None
        for _, args, kwargs, outputs in graph.calls:
            held = [_storage(tensor) for tensor in tree_flatten((args, kwargs))[0] if isinstance(tensor, Tensor)]
            for output in tree_flatten(outputs)[0]:
                if isinstance(output, Tensor) and _storage(output) not in held and output.is_floating_point():
                    output.fill_(torch.nan)


def _to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Tensor.to for real and pretended devices."""
    if args and isinstance(args[0], Tensor):
        device, dtype = args[0].device, args[0].dtype
    else:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype = device or self.device, dtype or self.dtype
    if (device, dtype) == (self.device, self.dtype):
        return self
    copied: Tensor = _run(torch.ops.aten._to_copy.default, (self,), {"dtype": dtype, "device": device})
    return copied


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute on the CPU what a pretended device would, or refuse."""
    name = func._schema.name + ("." + func._overloadname if func._overloadname != "default" else "")
    given = tree_flatten((args, kwargs))[0]
    tensors = [value for value in given if isinstance(value, Tensor)]
    wanted = next((value for value in given if isinstance(value, torch.device)), None)
    places = {tensor.device for tensor in tensors if tensor.dim() or isinstance(tensor, PretendTensor)}
    is_copy = name in _COPIES
    if len(places) > 1 and not is_copy and not (name in _INDEXED and _only_indices_on_cpu(tensors)):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {places} in {name}.")
    target = next((t.device for t in tensors if isinstance(t, PretendTensor)), torch.device("cpu"))
    if is_copy and isinstance(args[0], Tensor):
        target = args[0].device
    device = target if wanted is None else wanted
    plain = tree_map(lambda v: v.inner if isinstance(v, PretendTensor) else v, (args, kwargs))
    plain = tree_map(lambda v: torch.device("cpu") if isinstance(v, torch.device) else v, plain)
    _refuse_while_capturing(name, places | {device}, tensors, plain)
    computed = func(*plain[0], **plain[1])
    if is_copy and name != "aten::copy_" and device != args[0].device and _storage(computed) == _storage(plain[0][0]):
        computed = computed.clone()
    if PretendGraph.recording is not None and any(place.type == "cuda" for place in places | {device}):
        PretendGraph.recording.calls.append((func, *plain, computed))
    known = {id(tensor.inner): tensor for tensor in tensors if isinstance(tensor, PretendTensor)}

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor) or device.type != "cuda":
            return value
        return known[id(value)] if id(value) in known else PretendTensor(value, device)

    return tree_map(wrap, computed)


def _only_indices_on_cpu(tensors: list[Tensor]) -> bool:
    """CUDA tensors may be indexed by CPU tensors, which are then copied; not the other way round."""
    if PretendGraph.recording is not None:
        return False
    return isinstance(tensors[0], PretendTensor) and all(
        isinstance(t, PretendTensor) or not t.is_floating_point() for t in tensors
    )


def _refuse_while_capturing(name: str, places: set[torch.device], tensors: list[Tensor], plain: Any) -> None:
    if PretendGraph.recording is None:
        return
    kinds = {place.type for place in places} | {tensor.device.type for tensor in tensors}
    if name in _WAITS or (name in _COPIES and len(kinds) > 1):
        raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
    if name in _INDEXED and any(t.dtype == torch.bool for t in tensors[1:]):
        raise RuntimeError(f"operation not permitted when stream is capturing: {name} with a mask")


class _Stream:
    """A stream that is always done."""

    def wait_stream(self, other: "_Stream") -> None:
        assert isinstance(other, _Stream)


class _Event:
    """A moment on a device that computes at once."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        """The time does not matter here."""

    def synchronize(self) -> None:
        """Nothing is under way."""

    def elapsed_time(self, other: "_Event") -> float:
        return 1.0


class _Properties:
    total_memory = 80 * 2**30


@contextmanager
def pretend_cuda(monkeypatch: pytest.MonkeyPatch, num_devices: int) -> Iterator[None]:
    """Pretend that this machine has CUDA devices."""
    stream = _Stream()
    fakes: dict[str, Callable[..., Any]] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: num_devices,
        "get_device_name": lambda index=0: "Pretended GPU",
        "get_device_properties": lambda index=0: _Properties(),
        "synchronize": lambda device=None: None,
        "device": lambda device: nullcontext(),
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda: stream,
        "stream": lambda given: nullcontext(),
        "set_stream": lambda given: None,
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": PretendGraph,
        "graph": PretendGraph.capture,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(Tensor, "to", _to)
    # Else torch.tensor would ask the device itself for memory.
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with _Mode():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
