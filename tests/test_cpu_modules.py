"""The modules that make a model fast on a CPU compute what it computed before, up to half precision."""

import pytest
import torch
from random_models import CONFIGS, VOCABULARY, make_model, make_runner, tokens
from torch import nn
from transformers import GemmaConfig, Qwen2Config

from saguaro_core.models.linear import (
    FloatLinear,
    FusedRMSNorm,
    HalfEmbedding,
    HalfLinear,
    has_fbgemm,
    prepare_for_cpu,
)
from saguaro_core.models.runner import trunk_batch


class TestPrepareForCpu:
    @pytest.mark.parametrize("kind", list(CONFIGS))
    @pytest.mark.parametrize("is_half", [False, True])
    def test_logits_stay_within_half_precision(self, kind: str, is_half: bool) -> None:
        options = {"initializer_range": 0.1}
        exact, prepared = make_model(CONFIGS[kind], **options), make_model(CONFIGS[kind], **options)
        if is_half:
            prepared.half()
        prepare_for_cpu(prepared)
        ids = tokens(20)
        expected = make_runner(exact).forward(trunk_batch(ids, 0, 20))
        found = make_runner(prepared).forward(trunk_batch(ids, 0, 20))
        assert expected is not None
        assert found is not None
        assert float((found - expected).abs().max()) < 2e-3 * float(expected.abs().max())

    def test_every_part_is_swapped(self) -> None:
        model = make_model()
        prepare_for_cpu(model)
        kinds = [type(module) for module in model.modules()]
        linear = HalfLinear if has_fbgemm() else FloatLinear
        # Seven linears and two norms a layer, the head, the final norm, one embedding.
        assert kinds.count(linear) == 2 * 7 + 1
        assert kinds.count(FusedRMSNorm) == 2 * 2 + 1
        assert kinds.count(HalfEmbedding) == 1
        assert not any(isinstance(module, (nn.Linear, nn.Embedding)) for module in model.modules())
        assert not any(parameter.requires_grad for parameter in model.parameters() if parameter.dim() < 2)

    def test_biases_survive(self) -> None:
        torch.manual_seed(1)
        linear = nn.Linear(16, 8)
        x = torch.randn(5, 16)
        expected = linear(x)
        if has_fbgemm():
            assert torch.allclose(HalfLinear(linear)(x), expected, atol=2e-3)
        assert torch.allclose(FloatLinear(linear)(x), expected)
        model = make_model(Qwen2Config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("q_proj.bias"):
                    parameter.fill_(3.0)
        other = make_model(Qwen2Config)
        other.load_state_dict(model.state_dict())
        prepare_for_cpu(other)
        ids = tokens(9)
        exact = make_runner(model).forward(trunk_batch(ids, 0, 9))
        found = make_runner(other).forward(trunk_batch(ids, 0, 9))
        assert exact is not None
        assert found is not None
        assert float((found - exact).abs().max()) < 5e-3 * float(exact.abs().max())

    def test_machines_without_fbgemm_get_float32(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("saguaro_core.models.linear.has_fbgemm", lambda: False)
        exact, prepared = make_model(), make_model()
        prepare_for_cpu(prepared)
        assert not any(isinstance(module, HalfLinear) for module in prepared.modules())
        ids = tokens(12)
        expected = make_runner(exact).forward(trunk_batch(ids, 0, 12))
        found = make_runner(prepared).forward(trunk_batch(ids, 0, 12))
        assert expected is not None
        assert found is not None
        assert torch.allclose(found, expected, atol=1e-4)

    def test_a_norm_that_adds_one_to_its_weight_is_left_alone(self) -> None:
        options = {"vocab_size": VOCABULARY, "initializer_range": 0.1}
        exact, prepared = make_model(GemmaConfig, **options), make_model(GemmaConfig, **options)
        for model in (exact, prepared):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "norm" in name:
                        parameter.fill_(0.25)
        prepare_for_cpu(prepared)
        assert not any(isinstance(module, FusedRMSNorm) for module in prepared.modules())
        ids = tokens(12)
        expected = make_runner(exact).forward(trunk_batch(ids, 0, 12))
        found = make_runner(prepared).forward(trunk_batch(ids, 0, 12))
        assert expected is not None
        assert found is not None
        assert float((found - expected).abs().max()) < 5e-3 * float(expected.abs().max())
