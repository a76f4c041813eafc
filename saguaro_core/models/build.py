"""Builds what the processes run: a loaded model, made fast for its device, with a runner around it."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from saguaro_core.models.attention import use_slotted_attention
from saguaro_core.models.fixed_shape import FixedShapeRunner
from saguaro_core.models.lean import make_lean
from saguaro_core.models.linear import HalfLinear, has_fbgemm, prepare_for_cpu
from saguaro_core.models.load import LoadedDraft, LoadedTarget, load_draft, load_target
from saguaro_core.models.placement import DevicePlan
from saguaro_core.models.progress import Progress, ignore_progress
from saguaro_core.models.runner import ModelRunner
from saguaro_core.models.sharding import even_device_map
from saguaro_core.status import ModelInfo


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The target, ready to run."""

    runner: ModelRunner
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: frozenset[int]
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class DraftModel:
    """The draft, ready to run; `token_ids` [n] maps a trimmed head's columns to target ids."""

    runner: ModelRunner
    token_ids: Tensor | None
    info: ModelInfo


def build_target(
    name: str, plan: DevicePlan, on_progress: Progress = ignore_progress, *, compile_shapes: bool = False
) -> TargetModel:
    """Load the target onto its place (sharded over several devices by accelerate). Raises ModelError."""
    device_map = even_device_map(name, plan.devices) if len(plan.devices) > 1 else None
    loaded = load_target(name, device=plan.first, device_map=device_map, on_progress=on_progress)
    dtype, num_parameters = _prepare(loaded.model, plan, loaded.dtype)
    runner = _runner(loaded, plan, compile_shapes)
    info = _info(loaded.name, loaded.revision, dtype, num_parameters, plan, runner)
    return TargetModel(runner, loaded.tokenizer, loaded.eos_token_ids, info)


def build_draft(name: str, *, target_name: str, plan: DevicePlan, compile_shapes: bool = False) -> DraftModel:
    """Load the draft for a target onto its place. Raises ModelError, also when the two do not pair."""
    loaded = load_draft(name, target_name=target_name, device=plan.first)
    dtype, num_parameters = _prepare(loaded.model, plan, loaded.dtype)
    runner = _runner(loaded, plan, compile_shapes)
    note = "" if loaded.token_ids is None else f"a trimmed head of {loaded.vocabulary_size} tokens"
    info = _info(loaded.name, loaded.revision, dtype, num_parameters, plan, runner, note)
    return DraftModel(runner, loaded.token_ids, info)


def _prepare(model: PreTrainedModel, plan: DevicePlan, dtype: str) -> tuple[str, int]:
    """Make a model fast for its device; the weights' dtype as held, and how many parameters it has."""
    num_parameters = sum(p.numel() for p in model.parameters())
    use_slotted_attention(model)
    if len(plan.devices) == 1:  # A sharded model's layers carry the hooks that move data between devices.
        make_lean(model)
    if plan.is_cpu:
        prepare_for_cpu(model)
        dtype = "float16 weights, float32 activations" if has_fbgemm() else "float32"
    model.requires_grad_(False)
    return dtype, num_parameters


def _runner(loaded: LoadedTarget | LoadedDraft, plan: DevicePlan, compile_shapes: bool) -> ModelRunner:
    """A runner over a prepared model; with fixed shapes on a single GPU, where they become CUDA graphs."""
    device, sizes = torch.device(plan.first), (loaded.vocabulary_size, loaded.context_length)
    if device.type != "cuda" or len(plan.devices) > 1:
        return ModelRunner(loaded.model, vocabulary_size=sizes[0], context_length=sizes[1], device=device)
    backend = "inductor" if compile_shapes else None
    runner = FixedShapeRunner(
        loaded.model, vocabulary_size=sizes[0], context_length=sizes[1], device=device, backend=backend
    )
    runner.prepare()
    return runner


def _info(
    name: str, revision: str, dtype: str, num_parameters: int, plan: DevicePlan, runner: ModelRunner, note: str = ""
) -> ModelInfo:
    return ModelInfo(
        name=name,
        revision=revision,
        dtype=dtype,
        device=plan.describe(),
        cores=plan.cores,
        num_parameters=num_parameters,
        vocabulary_size=runner.vocabulary_size,
        context_length=runner.context_length,
        memory_bytes=_memory_bytes(runner.model),
        note=note,
    )


def _memory_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights as held now."""
    held = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    packed = {id(m.packed): m.num_bytes for m in model.modules() if isinstance(m, HalfLinear)}
    return sum(held.values()) + sum(packed.values())


def hardware_name() -> str:
    """The GPUs' names, else the processor's."""
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"{_cpu_name()} ({os.cpu_count()} cores)"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def software_versions() -> dict[str, str]:
    """Versions that a stored run names."""
    return {"python": platform.python_version(), **{name: version(name) for name in ("torch", "transformers")}}
