"""Lean decoder layers compute what transformers' own do, and models of another shape keep theirs."""

from typing import Any

import pytest
import torch
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from saguaro_core.models.attention import use_slotted_attention
from saguaro_core.models.lean import make_lean
from saguaro_core.models.linear import prepare_for_cpu
from saguaro_core.models.runner import ModelRunner, trunk_batch

SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE)),
    "llama with biases": (LlamaForCausalLM, LlamaConfig(**SHAPE, attention_bias=True)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE)),
}


def small_model(kind: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(3)
    model: PreTrainedModel = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # Norm weights and biases too: initial ones would hide a mistake.
            parameter.add_(torch.randn_like(parameter) * 0.2)
    use_slotted_attention(model)
    return model


def logits(model: PreTrainedModel, ids: list[int], num_prefilled: int) -> torch.Tensor:
    runner = ModelRunner(model, vocabulary_size=40, context_length=64, device=torch.device("cpu"))
    runner.forward(trunk_batch(ids[:num_prefilled], 0, 0))
    rest = ids[num_prefilled:]
    out = runner.forward(trunk_batch(rest, num_prefilled, len(rest)))
    assert out is not None
    return out[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_new", [1, 5])
def test_lean_layers_agree_with_transformers(family: str, num_new: int) -> None:
    ids = [int(i) for i in torch.randint(0, 40, (20,), generator=torch.Generator().manual_seed(1))]
    plain, lean = small_model(*FAMILIES[family]), small_model(*FAMILIES[family])
    assert make_lean(lean) == 3
    expected, got = logits(plain, ids, 20 - num_new), logits(lean, ids, 20 - num_new)
    assert torch.allclose(got, expected, atol=1e-4, rtol=1e-4)


def test_a_layer_with_other_arithmetic_stays_as_it_is() -> None:
    scaled = GraniteConfig(**{k: v for k, v in SHAPE.items() if k != "head_dim"}, residual_multiplier=0.3)
    model = small_model(GraniteForCausalLM, scaled)
    before = logits(model, [1, 2, 3, 4, 5], 2)
    assert make_lean(model) == 0
    assert torch.equal(logits(model, [1, 2, 3, 4, 5], 2), before)


def test_layers_of_one_class_that_differ_keep_their_own_arithmetic() -> None:
    shape = {name: size for name, size in SHAPE.items() if name != "head_dim"}
    config = SmolLM3Config(**shape, no_rope_layers=[1, 1, 0], pad_token_id=0)
    plain, tried = small_model(SmolLM3ForCausalLM, config), small_model(SmolLM3ForCausalLM, config)
    assert make_lean(tried) == 0
    assert torch.equal(logits(tried, [1, 2, 3, 4, 5], 2), logits(plain, [1, 2, 3, 4, 5], 2))


def test_half_precision_layers_stay_close_to_float32() -> None:
    ids = list(range(3, 23))
    plain, fast = small_model(*FAMILIES["llama"]), small_model(*FAMILIES["llama"])
    make_lean(fast)
    prepare_for_cpu(fast)
    expected, got = logits(plain, ids, 12), logits(fast, ids, 12)
    assert (got - expected).abs().max() < 2e-2 * expected.abs().max()
