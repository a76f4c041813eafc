"""The fixed-shape forwards that GPUs capture as graphs, run here: uncompiled, and compiled by torch.compile."""

import shutil
from collections.abc import Callable

import pytest
import torch
from pretend_cuda import pretend_cuda
from random_models import VOCABULARY, make_model, make_runner, tokens
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from saguaro_core.models.attention import use_slotted_attention
from saguaro_core.models.captured import Captured
from saguaro_core.models.fixed_shape import WIDTHS, FixedForward, FixedShapeRunner
from saguaro_core.models.lean import make_lean
from saguaro_core.models.runner import ForwardBatch, ModelRunner, trunk_batch

BUCKET = 256
CLOSE = 1e-4


def make_pair(
    kind: type[PreTrainedConfig] = LlamaConfig, *, is_lean: bool = True, backend: str | None = None, num_layers: int = 2
) -> tuple[ModelRunner, FixedShapeRunner]:
    """An ordinary runner and one with fixed shapes over equal models."""
    models = [make_model(kind, num_hidden_layers=num_layers) for _ in range(2)]
    for model in models:
        use_slotted_attention(model)
        assert not is_lean or make_lean(model)
    fixed = FixedShapeRunner(
        models[1],
        vocabulary_size=VOCABULARY,
        context_length=1024,
        device=torch.device("cpu"),
        backend=backend,
        bucket=BUCKET,
    )
    return make_runner(models[0]), fixed


def branch_batch(start: int, num_branches: int) -> ForwardBatch:
    """One pass of branches that leave the trunk at different places."""
    first_positions = start - torch.arange(num_branches) % 3
    trunk = torch.arange(start) < first_positions.unsqueeze(1)
    return ForwardBatch(
        token_ids=torch.tensor([tokens(num_branches, 7)]),
        positions=first_positions.unsqueeze(0),
        slots=torch.arange(start, start + num_branches).unsqueeze(0),
        used=start + num_branches,
        visible=torch.cat([trunk, torch.eye(num_branches, dtype=torch.bool)], dim=1).unsqueeze(0),
        num_logits=num_branches,
        first=start,
    )


def check_equal(ordinary: ModelRunner, fixed: FixedShapeRunner, batch: ForwardBatch) -> None:
    """Both runners say the same; where both have fixed shapes, so do their caches, which later batches read."""
    expected, got = ordinary.forward(batch), fixed.forward(batch)
    if expected is None:
        assert got is None
        return
    assert isinstance(got, Tensor)
    assert got.shape == expected.shape
    assert torch.allclose(got.cpu(), expected.cpu(), atol=CLOSE)


def check_equal_slots(ordinary: ModelRunner, fixed: FixedShapeRunner, count: int) -> None:
    for expected, got in zip(ordinary.cache.slotted, fixed.cache.slotted, strict=True):
        assert expected.keys is not None and got.keys is not None
        assert torch.allclose(got.keys[:, :, :count].cpu(), expected.keys[:, :, :count].cpu(), atol=CLOSE)


def drive(ordinary: ModelRunner, fixed: FixedShapeRunner, *, long: bool) -> None:
    """Rounds as a request makes them: prefill, verifications, rejected tokens forgotten, branches, a move."""
    ids = tokens(400)
    for batch in (trunk_batch(ids[:6], 0, 0), trunk_batch(ids[6:7], 6, 1), trunk_batch(ids[7:11], 7, 4)):
        check_equal(ordinary, fixed, batch)
    check_equal(ordinary, fixed, trunk_batch(ids[20:24], 9, 4))
    check_equal(ordinary, fixed, branch_batch(13, 4))
    for runner in (ordinary, fixed):
        runner.move([15], 13)
    check_equal(ordinary, fixed, trunk_batch(ids[30:33], 14, 2))
    if long:
        check_equal(ordinary, fixed, trunk_batch(ids[40:300], 17, 0))
        check_equal(ordinary, fixed, trunk_batch(ids[300:304], 277, 4))
        check_equal(ordinary, fixed, trunk_batch(ids[304:307], 279, 1))


@pytest.mark.parametrize("is_lean", [True, False])
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_fixed_shapes_equal_the_ordinary_forward(is_lean: bool, kind: type[PreTrainedConfig]) -> None:
    ordinary, fixed = make_pair(kind, is_lean=is_lean)
    drive(ordinary, fixed, long=True)
    assert set(fixed.fixed) == {(1, 256), (4, 256), (4, 512)}


def test_every_width_and_one_beyond() -> None:
    ordinary, fixed = make_pair()
    for n in (1, 2, 3, 5, 9, 17, 33, 64, 65):
        check_equal(ordinary, fixed, trunk_batch(tokens(20), 0, 0))
        check_equal(ordinary, fixed, branch_batch(20, n))
    assert [width for width, _ in fixed.fixed] == list(WIDTHS)


def test_padding_leaves_no_trace_in_the_slots_in_use() -> None:
    ordinary, fixed = make_pair()
    check_equal(ordinary, fixed, trunk_batch(tokens(20), 0, 20))
    check_equal(ordinary, fixed, trunk_batch(tokens(5), 20, 5))
    check_equal_slots(ordinary, fixed, 25)


def test_buffers_that_grew_are_followed() -> None:
    ordinary, fixed = make_pair()
    drive(ordinary, fixed, long=False)
    before = dict(fixed.fixed)
    check_equal(ordinary, fixed, trunk_batch(tokens(1400), 0, 0))
    check_equal(ordinary, fixed, trunk_batch(tokens(4), 30, 4))
    assert fixed.fixed[4, 256] is not before[4, 256]


def test_batches_of_several_sequences_run_as_before() -> None:
    ordinary, fixed = make_pair()
    single = trunk_batch(tokens(4), 0, 4)
    batch = ForwardBatch(
        token_ids=torch.cat([single.token_ids, single.token_ids.flip(1)]),
        positions=single.positions.repeat(2, 1),
        slots=single.slots.repeat(2, 1),
        used=4,
        visible=single.visible.repeat(2, 1, 1) if single.visible is not None else None,
        num_logits=4,
        first=0,
    )
    check_equal(ordinary, fixed, batch)
    assert not fixed.fixed


def test_a_bucket_is_at_most_a_quarter_too_large() -> None:
    _, fixed = make_pair()
    assert [fixed.bucket_of(used) for used in (1, 256, 257, 1024, 1025, 4097)] == [256, 256, 512, 1024, 1280, 5120]
    sizes = {fixed.bucket_of(used) for used in range(1, 32_768)}
    assert len(sizes) <= 4 + 4 * 5
    assert all(used <= fixed.bucket_of(used) <= max(256, used * 5 / 4 + 256) for used in range(1, 32_768, 97))


def test_a_model_that_cannot_be_captured_runs_as_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Captured[object]) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    ordinary, fixed = make_pair()
    monkeypatch.setattr(Captured, "__call__", refuse)
    drive(ordinary, fixed, long=False)
    assert not fixed.fixed
    assert caplog.text.count("not permitted when stream is capturing") == 1


def num_compiled() -> int:
    return counters["stats"]["unique_graphs"]


def test_compiled_functions_equal_the_ordinary_forward() -> None:
    torch._dynamo.reset()
    ordinary, fixed = make_pair(backend="aot_eager", num_layers=1)
    fixed.prepare((1, 4))
    fixed.prepare((4,), used=257)
    prepared, before = dict(fixed.fixed), num_compiled()
    for _ in range(2):
        drive(ordinary, fixed, long=True)
    assert fixed.fixed == prepared, "a shape was made after prepare"
    assert num_compiled() == before, "a shape was compiled again"


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile needs a C++ compiler")
def test_inductor_code_equals_the_ordinary_forward() -> None:
    torch._dynamo.reset()
    ordinary, fixed = make_pair(backend="inductor", num_layers=1)
    fixed.prepare((4,))
    before = num_compiled()
    ids = tokens(40)
    check_equal(ordinary, fixed, trunk_batch(ids[:6], 0, 0))
    for start in (6, 8, 12, 13):
        check_equal(ordinary, fixed, trunk_batch(ids[start : start + 4], start, 4))
    check_equal(ordinary, fixed, branch_batch(17, 4))
    assert num_compiled() == before, "a shape was compiled again"


def test_a_shape_that_was_not_prepared_is_not_compiled() -> None:
    ordinary, fixed = make_pair(backend="a backend that does not exist")
    drive(ordinary, fixed, long=False)
    assert fixed.fixed


def make_pair_on(device: torch.device) -> tuple[ModelRunner, FixedShapeRunner]:
    with device:
        model = make_model()
    ordinary = ModelRunner(model, vocabulary_size=VOCABULARY, context_length=1024, device=device)
    return ordinary, FixedShapeRunner(
        model, vocabulary_size=VOCABULARY, context_length=1024, device=device, bucket=BUCKET
    )


def test_captured_graphs_on_a_pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend_cuda(monkeypatch, 2):
        ordinary, fixed = make_pair_on(torch.device("cuda", 1))
        drive(ordinary, fixed, long=True)
        check_equal_slots(ordinary, fixed, 280)
        assert fixed.fixed_move is not None
    assert set(fixed.fixed) == {(1, 256), (4, 256), (4, 512)}


def waits(self: FixedForward) -> tuple[Tensor, Tensor]:
    logits = self.inputs.float() * self.inputs.sum().item()
    return logits, logits.sum().isnan()


def copies(self: FixedForward) -> tuple[Tensor, Tensor]:
    logits = self.inputs.float() + torch.ones(3, 1).to(self.inputs.device)
    return logits, logits.sum().isnan()


@pytest.mark.parametrize("wrong", [waits, copies])
def test_a_pretended_capture_refuses_what_cuda_refuses(
    wrong: Callable[[FixedForward], tuple[Tensor, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pretend_cuda(monkeypatch, 1):
        ordinary, fixed = make_pair_on(torch.device("cuda", 0))
        monkeypatch.setattr(FixedForward, "_forward", wrong)
        drive(ordinary, fixed, long=False)
    assert not fixed.fixed
    assert caplog.text.count("not permitted when stream is capturing") == 1


@pytest.mark.gpu
def test_graphs_equal_the_ordinary_forward() -> None:
    ordinary, fixed = make_pair_on(torch.device("cuda:0"))
    drive(ordinary, fixed, long=True)
    assert fixed.fixed
