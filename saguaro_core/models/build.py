"""Builds what the processes run: a loaded model, made fast for its device, with a runner around it."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from saguaro_core import scores
from saguaro_core.config import CpuWeights
from saguaro_core.models.attention import use_slotted_attention
from saguaro_core.models.fixed_shape import FixedShapeRunner
from saguaro_core.models.lean import make_lean
from saguaro_core.models.linear import HalfLinear, has_fbgemm, prepare_for_cpu
from saguaro_core.models.load import LoadedDraft, LoadedTarget, load_draft, load_target
from saguaro_core.models.memory import give_back
from saguaro_core.models.native.trial import try_native
from saguaro_core.models.placement import DevicePlan
from saguaro_core.models.progress import Progress, ignore_progress
from saguaro_core.models.runner import ModelRunner, Runner
from saguaro_core.models.sharding import even_device_map
from saguaro_core.status import ModelInfo

Loaded = LoadedTarget | LoadedDraft


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The target, ready to run."""

    runner: Runner
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: frozenset[int]
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class DraftModel:
    """The draft, ready to run; `token_ids` [n] maps a trimmed head's columns to target ids."""

    runner: Runner
    token_ids: Tensor | None
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class _Built:
    """A runner, how it holds the weights, and their bytes."""

    runner: Runner
    dtype: str
    memory_bytes: int


def build_target(
    name: str,
    plan: DevicePlan,
    on_progress: Progress = ignore_progress,
    *,
    compile_shapes: bool = False,
    cpu_weights: CpuWeights = "auto",
) -> TargetModel:
    """Load the target onto its place (sharded over several devices by accelerate). Raises ModelError."""
    device_map = even_device_map(name, plan.devices) if len(plan.devices) > 1 else None
    loaded = load_target(name, device=plan.first, device_map=device_map, on_progress=on_progress)
    if plan.is_cpu:
        on_progress("Preparing the target (the first start compiles it for this processor)", None)
    num_parameters = _count(loaded.model)
    # Several float16 rows cost little more than one, which is what verification needs; of codes one row is cheaper.
    built = _build(loaded, plan, compile_shapes, "float16" if cpu_weights == "auto" else cpu_weights)
    model = TargetModel(
        built.runner, loaded.tokenizer, loaded.eos_token_ids, _info(loaded, built, num_parameters, plan)
    )
    del loaded
    give_back()
    return model


def build_draft(
    name: str,
    *,
    target_name: str,
    plan: DevicePlan,
    compile_shapes: bool = False,
    cpu_weights: CpuWeights = "auto",
) -> DraftModel:
    """Load the draft for a target onto its place. Raises ModelError, also when the two do not pair."""
    loaded = load_draft(name, target_name=target_name, device=plan.first)
    num_parameters = _count(loaded.model)
    built = _build(loaded, plan, compile_shapes, cpu_weights)
    note = "" if loaded.token_ids is None else f"a trimmed head of {loaded.vocabulary_size} tokens"
    model = DraftModel(built.runner, loaded.token_ids, _info(loaded, built, num_parameters, plan, note))
    del loaded
    give_back()
    return model


def _count(model: PreTrainedModel) -> int:
    return sum(p.numel() for p in model.parameters())


def _build(loaded: Loaded, plan: DevicePlan, compile_shapes: bool, cpu_weights: CpuWeights) -> _Built:
    """Make a model fast for its device: the compiled decoder on CPUs where it fits, else torch."""
    if plan.is_cpu:
        scores.prepare()
        native = try_native(
            loaded.model,
            loaded.quantised,
            cpu_weights,
            vocabulary_size=loaded.vocabulary_size,
            context_length=loaded.context_length,
            threads=max(1, len(plan.cores)),
        )
        if native is not None:
            return _Built(native, f"{native.describe()} weights, float32 activations", native.num_bytes)
    dtype = _prepare(loaded.model, plan, loaded.dtype)
    return _Built(_torch_runner(loaded, plan, compile_shapes), dtype, _memory_bytes(loaded.model))


def _prepare(model: PreTrainedModel, plan: DevicePlan, dtype: str) -> str:
    """Make a torch model fast for its device; how it then holds its weights."""
    use_slotted_attention(model)
    if len(plan.devices) == 1:  # A sharded model's layers carry the hooks that move data between devices.
        make_lean(model)
    if plan.is_cpu:
        prepare_for_cpu(model)
        dtype = "float16 weights, float32 activations" if has_fbgemm() else "float32"
    model.requires_grad_(False)
    return dtype


def _torch_runner(loaded: Loaded, plan: DevicePlan, compile_shapes: bool) -> ModelRunner:
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


def _info(loaded: Loaded, built: _Built, num_parameters: int, plan: DevicePlan, note: str = "") -> ModelInfo:
    return ModelInfo(
        name=loaded.name,
        revision=loaded.revision,
        dtype=built.dtype,
        device=plan.describe(),
        cores=plan.cores,
        num_parameters=num_parameters,
        vocabulary_size=loaded.vocabulary_size,
        context_length=loaded.context_length,
        memory_bytes=built.memory_bytes,
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
