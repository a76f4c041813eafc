"""Small random models of several architectures, and runners over them."""

from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from saguaro_core.models.runner import ModelRunner

VOCABULARY = 61
CONFIGS: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def make_model(kind: type[PreTrainedConfig] = LlamaConfig, **options: object) -> PreTrainedModel:
    """A random model with two query heads for each key-value head; large weights, so that contexts matter."""
    torch.manual_seed(0)
    values: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    make_config: Callable[..., PreTrainedConfig] = kind
    model: PreTrainedModel = AutoModelForCausalLM.from_config(make_config(**(values | options)))
    model.eval()
    return model


def make_runner(model: PreTrainedModel) -> ModelRunner:
    return ModelRunner(model, vocabulary_size=VOCABULARY, context_length=1024, device=torch.device("cpu"))


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()
