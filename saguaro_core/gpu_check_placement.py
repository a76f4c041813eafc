"""Are the models where they were put? Devices, one and two of them, and a target sharded over two."""

import platform

import torch
from transformers import PreTrainedModel

from saguaro_core.checks.local import LocalDraft, LocalEngine
from saguaro_core.checks.random_models import make_tiny_pair
from saguaro_core.checks.rows import Problems, Row, Setting, reported_in
from saguaro_core.config import Placement, SamplingParams, SpeculationConfig
from saguaro_core.errors import ModelError
from saguaro_core.models.build import TargetModel, build_target, hardware_name, software_versions
from saguaro_core.models.catalogue import DEFAULT_TARGET
from saguaro_core.models.fetch import fetch_model
from saguaro_core.models.placement import DevicePlan, resolve_placement
from saguaro_core.models.runner import ModelRunner, trunk_batch

_PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
# Half-precision sums in another order: how far logits of two placements may lie apart, in shares of the largest.
_LOGITS_APART = 0.02


def check_placement(setting: Setting) -> list[Row]:
    """Rows on the devices that are here and on models put there."""
    rows: list[Row] = []
    with reported_in(rows, "devices"):
        rows.append(_devices(setting))
    with reported_in(rows, "placement on one device"):
        rows.append(_placed("placement on one device", setting.first, setting.first))
    with reported_in(rows, "placement on two devices"):
        rows.append(_two_devices(setting))
    with reported_in(rows, "target sharded over two devices"):
        rows.append(_sharded(setting))
    return rows


def _devices(setting: Setting) -> Row:
    versions = ", ".join(f"{name} {number}" for name, number in software_versions().items())
    where = resolve_placement(Placement())
    automatic = f"automatic placement: target {where.target.describe()}, draft {where.draft.describe()}"
    if not setting.is_cuda:
        return Row("devices", "passed", f"the CPU stands in for GPUs ({platform.machine()}); {versions}; {automatic}")
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    sizes = ", ".join(f"{p.total_memory / 2**30:.0f} GiB" for p in properties)
    software = f"{versions}, CUDA {torch.version.cuda}"
    return Row("devices", "passed", f"{hardware_name()} ({sizes}); {software}; {automatic}")


def _two_devices(setting: Setting) -> Row:
    name = "placement on two devices"
    if setting.first == setting.last:
        return Row(name, "skipped", f"only {setting.first} is used")
    return _placed(name, setting.first, setting.last)


def _placed(name: str, target_device: str, draft_device: str) -> Row:
    """A tiny random pair on its devices says in SSD what its target says alone."""
    problems = Problems()
    target, draft = make_tiny_pair((target_device, draft_device), difference=0.1)
    for runner, device in ((target, target_device), (draft, draft_device)):
        strays = _tensors_elsewhere(runner.model, torch.device(device))
        problems.expect(not strays, f"not on {device}: {', '.join(strays[:3])}")
    engine = LocalEngine(target, LocalDraft(draft, draft_device), target_device)
    sampling, speculation = SamplingParams(max_new_tokens=24), SpeculationConfig()
    alone, together = (engine.run(mode, _PROMPT, sampling, speculation) for mode in ("ar", "ssd"))
    problems.expect(alone.token_ids == together.token_ids, "AR and SSD differ")
    return problems.row(name, f"target on {target_device}, draft on {draft_device}; SSD says what AR says")


def _tensors_elsewhere(model: PreTrainedModel, device: torch.device) -> list[str]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [tensor_name for tensor_name, tensor in tensors if tensor.device != device]


def _sharded(setting: Setting) -> Row:
    """The default target's layers lie on both devices, and it computes what it computes on one."""
    name = "target sharded over two devices"
    if setting.first == setting.last:
        return Row(name, "skipped", f"only {setting.first} is used")
    try:
        fetch_model(DEFAULT_TARGET)
    except ModelError as error:
        return Row(name, "skipped", f"the default target is not here: {error}")
    problems = Problems()
    whole = build_target(DEFAULT_TARGET, DevicePlan((setting.first,)))
    sharded = build_target(DEFAULT_TARGET, DevicePlan((setting.first, setting.last)))
    assert isinstance(sharded.runner, ModelRunner)
    places = {str(parameter.device) for parameter in sharded.runner.model.parameters()}
    problems.expect(places == {setting.first, setting.last}, f"its layers lie on {sorted(places)}")
    expected, got = _logits(whole), _logits(sharded)
    apart = float((expected - got).abs().max() / expected.abs().max())
    problems.expect(apart <= _LOGITS_APART, "its logits differ from those of one device")
    return problems.row(name, f"{DEFAULT_TARGET} by accelerate; logits {apart:.2%} apart", {"apart": apart})


def _logits(target: TargetModel) -> torch.Tensor:
    logits = target.runner.forward(trunk_batch(list(range(100, 132)), 0, 8))
    assert logits is not None
    return logits.cpu()
