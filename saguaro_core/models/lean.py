"""Decoder layers with fewer steps: fused projections, one rotary step for queries and keys, no repeated keys.

A few tokens per forward leave an eager layer mostly waiting for its many small operations. A layer of the common
shape (two norms, q/k/v/o projections, gated MLP, plain residuals; optional q and k norms) is replaced by the same
arithmetic in about a third of the steps, on every device. Whether a layer has that shape is not guessed from its
name: both are run on the same input, and a layer whose lean form disagrees stays as transformers wrote it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from saguaro_core.models.attention import fold_mask, num_query_groups
from saguaro_core.models.kv_cache import SlotPlan, SlottedCache

_TRIAL_TOKENS = 5
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_GATED = ("gate_proj", "up_proj", "down_proj")


def fuse(linears: list[nn.Linear]) -> nn.Linear:
    """One linear layer that computes several of the same input at once; their outputs follow each other."""
    first = linears[0]
    total = sum(linear.out_features for linear in linears)
    weight = torch.cat([linear.weight.detach() for linear in linears])
    has_bias = first.bias is not None
    fused = nn.Linear(first.in_features, total, bias=has_bias, device="meta")
    fused.weight = nn.Parameter(weight, requires_grad=False)
    if has_bias:
        fused.bias = nn.Parameter(torch.cat([linear.bias.detach() for linear in linears]), requires_grad=False)
    return fused


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) with gate and up computed together."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        gate, up = mlp.get_submodule("gate_proj"), mlp.get_submodule("up_proj")
        assert isinstance(gate, nn.Linear)
        assert isinstance(up, nn.Linear)
        self.gate_up = fuse([gate, up])
        self.down = mlp.get_submodule("down_proj")
        self.act: Any = mlp.act_fn

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(self.act(gate).mul_(up))
        return out


class LeanDecoderLayer(nn.Module):
    """One pre-norm decoder layer with grouped attention over a SlottedCache. Stands in for transformers' own layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        attention: Any = layer.get_submodule("self_attn")
        self.layer_index: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.num_heads: int = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads: int = attention.k_proj.out_features // self.head_dim
        self.qkv = fuse([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = attention.o_proj
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.input_norm = layer.get_submodule("input_layernorm")
        self.mlp_norm = layer.get_submodule("post_attention_layernorm")
        mlp = layer.get_submodule("mlp")
        is_gated = all(isinstance(getattr(mlp, name, None), nn.Linear) for name in _GATED)
        self.mlp = GatedMLP(mlp) if is_gated else mlp

    def forward(
        self,
        hidden_states: Tensor,  # [b, n, hidden]
        attention_mask: Tensor | None = None,  # [b, 1, groups * n, used]
        position_embeddings: tuple[Tensor, Tensor] | None = None,  # of LeanRotary
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        assert position_embeddings is not None
        assert cache is not None
        attended = self._attend(self.input_norm(hidden_states), attention_mask, position_embeddings, cache)
        hidden_states = hidden_states + attended
        out: Tensor = hidden_states + self.mlp(self.mlp_norm(hidden_states))
        return out

    def _attend(self, x: Tensor, mask: Tensor | None, rotary: tuple[Tensor, Tensor], cache: Cache) -> Tensor:
        batch, n, _ = x.shape
        heads = self.qkv(x).view(batch, n, -1, self.head_dim)
        turned = self.num_heads + self.num_kv_heads
        query_key, value = heads[:, :, :turned], heads[:, :, turned:].transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = query_key.split([self.num_heads, self.num_kv_heads], dim=2)
            query_key = torch.cat([self.q_norm(query), self.k_norm(key)], dim=2)
        query_key = _rotate(query_key, *rotary).transpose(1, 2)
        query, key = query_key[:, : self.num_heads], query_key[:, self.num_heads :]
        key, value = cache.update(key, value, self.layer_index)
        folded = query.reshape(batch, self.num_kv_heads, -1, self.head_dim)
        out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=self.scaling)
        merged = out.view(batch, self.num_heads, n, self.head_dim).transpose(1, 2).reshape(batch, n, -1)
        attended: Tensor = self.out(merged)
        return attended


class LeanRotary(nn.Module):
    """cos and sin of a model's rotary embedding, made ready once for all layers: [b, n, 1, head_dim], sin's first
    half negated.
    """

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(x, position_ids=position_ids)
        half = sin.shape[-1] // 2
        return cos.unsqueeze(2), torch.cat([-sin[..., :half], sin[..., half:]], dim=-1).unsqueeze(2)


def _rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotary embedding of x [b, n, heads, head_dim], halves paired as in Llama: rotate_half(x) * sin = roll(x) *
    signed sin.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


@torch.inference_mode()
def make_lean(model: PreTrainedModel) -> int:
    """Replace the decoder layers that have the common shape, in place; returns how many were replaced.

    Call it while the linears are still nn.Linear and the slotted attention is set. Either all layers are replaced or
    none: they share the rotary embedding. Every layer is tried, because layers of one class may differ (some without
    rotary positions, say).
    """
    decoder: Any = model.get_decoder()
    layers: Any = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not hasattr(decoder, "rotary_emb"):
        return 0
    rotary = LeanRotary(decoder.rotary_emb)
    lean: list[LeanDecoderLayer] = []
    for layer in layers:
        candidate = _lean_form(model, decoder, rotary, layer)
        if candidate is None:
            return 0
        lean.append(candidate)
    decoder.layers, decoder.rotary_emb = nn.ModuleList(lean), rotary
    return len(lean)


def _has_parts(layer: nn.Module) -> bool:
    attention = getattr(layer, "self_attn", None)
    return (
        attention is not None
        and all(isinstance(getattr(attention, name, None), nn.Linear) for name in _PROJECTIONS)
        and isinstance(getattr(attention, "scaling", None), float)
        and all(hasattr(layer, name) for name in ("input_layernorm", "post_attention_layernorm", "mlp"))
    )


def _lean_form(model: PreTrainedModel, decoder: Any, rotary: LeanRotary, layer: nn.Module) -> LeanDecoderLayer | None:
    """The lean form of a layer, if it computes what the layer does on a random input with a causal mask."""
    if not _has_parts(layer):
        return None
    weight: Tensor = layer.self_attn.q_proj.weight  # type: ignore[union-attr, assignment]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _TRIAL_TOKENS, weight.shape[1], generator=generator).to(weight)
    positions = torch.arange(3, 3 + _TRIAL_TOKENS, device=weight.device).unsqueeze(0)
    visible = torch.ones(1, _TRIAL_TOKENS, _TRIAL_TOKENS, dtype=torch.bool, device=weight.device).tril()
    mask = fold_mask(visible, num_query_groups(model.config), weight.dtype)
    try:
        lean = LeanDecoderLayer(layer)
        results = []
        for candidate, embedding in ((layer, decoder.rotary_emb), (lean, rotary)):
            cache = SlottedCache(model.config.num_hidden_layers)
            cache.plan = SlotPlan(positions - 3, _TRIAL_TOKENS, 0)
            rotated = embedding(x, position_ids=positions)
            out = candidate(x, attention_mask=mask, position_ids=positions, cache=cache, position_embeddings=rotated)
            results.append(out.float())
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None
    error = (results[0] - results[1]).abs().max()
    return lean if bool(error <= 2e-2 * results[0].abs().max()) else None
