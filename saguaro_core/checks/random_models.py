"""Random weights in the shapes of known models, made where they are to run, and runners over them."""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from saguaro_core.models.attention import use_slotted_attention
from saguaro_core.models.fixed_shape import BUCKET, FixedShapeRunner
from saguaro_core.models.lean import make_lean
from saguaro_core.models.runner import ModelRunner

_CONTEXT_LENGTH = 8192
_TINY_BUCKET = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a Llama; `scale` is the standard deviation of its random weights."""

    name: str
    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_tied: bool = False
    scale: float = 0.02


LLAMA_8B = Shape(
    name="8B",
    vocabulary_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
)
LLAMA_1B = Shape(
    name="1B",
    vocabulary_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    is_tied=True,
)
TINY = Shape(
    name="tiny",
    vocabulary_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    scale=0.3,
)


@torch.inference_mode()
def make_random_model(shape: Shape, device: str, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """A model of these sizes with random weights, ready to run on a device; nothing is downloaded."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=_CONTEXT_LENGTH,
        tie_word_embeddings=shape.is_tied,
        initializer_range=shape.scale,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval().requires_grad_(False)
    use_slotted_attention(model)
    make_lean(model)
    return model


@torch.inference_mode()
def perturb(model: PreTrainedModel, share: float, seed: int) -> None:
    """Add noise to every matrix, `share` of its own standard deviation: a draft that agrees now and then."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.add_(torch.randn_like(parameter) * parameter.std() * share)


def make_runner(model: PreTrainedModel, device: str) -> ModelRunner:
    """The ordinary runner over a random model."""
    return ModelRunner(
        model,
        vocabulary_size=model.config.vocab_size,
        context_length=_CONTEXT_LENGTH,
        device=torch.device(device),
    )


def make_fixed_runner(
    model: PreTrainedModel, device: str, *, bucket: int = BUCKET, backend: str | None = None
) -> FixedShapeRunner:
    """A runner with fixed shapes over a random model: CUDA graphs where there is CUDA."""
    return FixedShapeRunner(
        model,
        vocabulary_size=model.config.vocab_size,
        context_length=_CONTEXT_LENGTH,
        device=torch.device(device),
        backend=backend,
        bucket=bucket,
    )


def make_tiny_pair(
    devices: tuple[str, str], *, difference: float, shape: Shape = TINY
) -> tuple[FixedShapeRunner, FixedShapeRunner]:
    """A tiny float32 target and a draft that differs from it, each on its device, in fixed shapes of few slots."""
    target, draft = (make_random_model(shape, device, torch.float32) for device in devices)
    perturb(draft, difference, seed=1)
    first, second = (
        make_fixed_runner(model, device, bucket=_TINY_BUCKET)
        for model, device in zip((target, draft), devices, strict=True)
    )
    return first, second
