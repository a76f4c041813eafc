"""Do compiled fixed shapes compute what the ordinary forward computes, on this device?"""

import time

import torch

from saguaro_core.checks.random_models import TINY, make_fixed_runner, make_random_model, make_runner
from saguaro_core.checks.rows import Problems, Row, Setting, reported_in
from saguaro_core.models.runner import Runner, trunk_batch

_NAME = "compiled shapes, tiny model"
_WIDTHS = (1, 4)
_LOGITS_APART = 1e-3


def check_compile(setting: Setting) -> list[Row]:
    """One row: torch.compile's code, captured where there is CUDA, against the ordinary forward."""
    if setting.is_tiny:
        return [Row(_NAME, "skipped", "--tiny leaves the compiler out; the tests run it on CPUs")]
    rows: list[Row] = []
    with reported_in(rows, _NAME):
        rows.append(_compiled(setting.first))
    return rows


def _compiled(device: str) -> Row:
    problems = Problems()
    model = make_random_model(TINY, device, torch.float32)
    ordinary, fixed = make_runner(model, device), make_fixed_runner(model, device, backend="inductor")
    started = time.monotonic()
    fixed.prepare(_WIDTHS)
    seconds = time.monotonic() - started
    problems.expect(len(fixed.fixed) == len(_WIDTHS), "its code could not be captured, see above")
    apart = max(_apart(ordinary, fixed, start, n) for start, n in ((0, 4), (4, 1), (5, 3), (7, 4)))
    problems.expect(apart <= _LOGITS_APART, f"logits more than {_LOGITS_APART:.2%} apart")
    detail = f"{len(_WIDTHS)} shapes compiled in {seconds:.0f} s on {device}; logits {apart:.2%} apart"
    return problems.row(_NAME, detail, {"seconds": seconds, "apart": apart})


def _apart(first: Runner, second: Runner, start: int, n: int) -> float:
    """How far the two runners' logits lie apart for n tokens from `start` on, in shares of the largest."""
    batch = trunk_batch([(7 * i) % TINY.vocabulary_size for i in range(start, start + n)], start, n)
    expected, got = first.forward(batch), second.forward(batch)
    assert expected is not None
    assert got is not None
    return float((expected - got).abs().max() / expected.abs().max())
