"""What does one forward cost on this device: a verification, a draft step, a pass of branches; eager against graphs?

Random weights in the shapes of an 8B and a 1B model, 512 tokens of context. Times are medians between two events on the
device's own stream, so a device that waits for its host is seen to wait.
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from saguaro_core.checks.random_models import (
    LLAMA_1B,
    LLAMA_8B,
    TINY,
    Shape,
    make_fixed_runner,
    make_random_model,
    make_runner,
)
from saguaro_core.checks.rows import Row, Setting, reported_in
from saguaro_core.models.fixed_shape import FixedShapeRunner
from saguaro_core.models.runner import ForwardBatch, Runner, trunk_batch

LOOKAHEAD = 4
BUDGET = 12
_CONTEXT = 512
_WARM_UPS, _REPEATS = 3, 20
# Other kernels add in another order. bfloat16 has 8 bits: over 32 layers logits may lie this far apart, in shares of
# the largest.
_LOGITS_APART = {torch.bfloat16: 0.1, torch.float32: 1e-3}


@dataclass(frozen=True, slots=True)
class _Forward:
    """One kind of forward, as decoding makes it."""

    name: str
    batch: ForwardBatch


def check_forwards(setting: Setting) -> list[Row]:
    """A row for each kind of forward of each model."""
    rows: list[Row] = []
    verify, step = f"verify, {1 + LOOKAHEAD} rows", "draft step, 1 row"
    target = [_Forward("decode, 1 row", _trunk(1)), _Forward(verify, _trunk(1 + LOOKAHEAD))]
    draft = [_Forward(step, _trunk(1)), _Forward(f"branch pass, {BUDGET} rows", branch_pass(_CONTEXT, BUDGET))]
    shapes = (LLAMA_8B, LLAMA_1B) if setting.is_cuda and not setting.is_tiny else (TINY, TINY)
    roles = (("target", shapes[0], setting.first, target), ("draft", shapes[1], setting.last, draft))
    for role, shape, device, forwards in roles:
        with reported_in(rows, f"{shape.name} {role}"):
            rows += _measure_model(role, shape, device, forwards)
        gc.collect()  # The first model's memory is needed for the second.
    return rows


def _trunk(n: int) -> ForwardBatch:
    return trunk_batch(list(range(1, 1 + n)), _CONTEXT, n)


def branch_pass(start: int, num_branches: int) -> ForwardBatch:
    """The first pass of branches that leave a trunk of `start` tokens at its last LOOKAHEAD + 1 places."""
    first_positions = start - torch.arange(num_branches) % (LOOKAHEAD + 1)
    trunk = torch.arange(start) < first_positions.unsqueeze(1)
    return ForwardBatch(
        token_ids=torch.arange(1, 1 + num_branches).unsqueeze(0),
        positions=first_positions.unsqueeze(0),
        slots=torch.arange(start, start + num_branches).unsqueeze(0),
        used=start + num_branches,
        visible=torch.cat([trunk, torch.eye(num_branches, dtype=torch.bool)], dim=1).unsqueeze(0),
        num_logits=num_branches,
        first=start,
    )


def _measure_model(role: str, shape: Shape, device: str, forwards: list[_Forward]) -> list[Row]:
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = make_random_model(shape, device, dtype)
    gigabytes = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e9
    eager, fixed = make_runner(model, device), make_fixed_runner(model, device)
    for runner in (eager, fixed):
        runner.forward(trunk_batch(torch.arange(_CONTEXT).remainder(shape.vocabulary_size).tolist(), 0, 0))
    name = f"{shape.name} {role}: {{}}"
    place = f"random weights, {gigabytes:.1f} GB of {str(dtype).removeprefix('torch.')} on {device}"
    rows: list[Row] = []
    for forward in forwards:
        with reported_in(rows, name.format(forward.name)):
            rows.append(_compare(name.format(forward.name), forward.batch, eager, fixed, place))
    return rows


def _compare(name: str, batch: ForwardBatch, eager: Runner, fixed: FixedShapeRunner, place: str) -> Row:
    expected, got = _logits(eager, batch), _logits(fixed, batch)
    limit = _LOGITS_APART[fixed.model.dtype]
    apart = float((got - expected).abs().max() / expected.abs().max())
    times = [median_ms(lambda runner=runner: runner.forward(batch), fixed.device) for runner in (eager, fixed)]  # type: ignore[misc]
    way = "a graph" if fixed.device.type == "cuda" else "fixed shape (no graph on a CPU)"
    detail = (
        f"eager {times[0]:.2f} ms, {way} {times[1]:.2f} ms, ratio {times[0] / times[1]:.2f}; logits {apart:.2%} apart"
    )
    problems = [] if apart <= limit else [f"logits more than {limit:.2%} apart"]
    problems += [] if fixed.fixed else ["nothing was captured, see the log"]
    detail = "; ".join([*problems, detail, place])
    data = {"eager_ms": times[0], "fixed_ms": times[1], "apart": apart}
    return Row(name, "failed" if problems else "measured", detail, data)


def _logits(runner: Runner, batch: ForwardBatch) -> Tensor:
    logits = runner.forward(batch)
    assert logits is not None
    return logits


def median_ms(call: Callable[[], object], device: torch.device) -> float:
    """The median time of a call in milliseconds, by the device's own clock where it has one."""
    for _ in range(_WARM_UPS):
        call()
    return statistics.median(_time_ms(call, device) for _ in range(_REPEATS))


def _time_ms(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e3
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))
