"""Collects the weights of a transformers model for the compiled decoder, quantised ones in their own form."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from saguaro_core.config import CpuWeights
from saguaro_core.models.native.blocks import QuantisedWeights
from saguaro_core.models.native.packing import Arena, Matrix, Packed, pack, stack
from saguaro_core.models.native.tile import BLOCK

Floats = NDArray[np.float32]


class NotLlamaLikeError(Exception):
    """The model has another structure than the compiled decoder; the message says where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """Everything that decoder.forward needs of a model; shapes as it says there."""

    embedding: Packed
    matrices: tuple[tuple[Packed, Packed, Packed, Packed], ...]  # of each layer: QKV, OUT, GATE_UP, DOWN
    norms: Floats
    biases: tuple[Floats, Floats, Floats, Floats]
    head_norms: Floats
    head: Packed
    head_bias: Floats
    eps: float
    scaling: float
    head_dim: int
    num_kv_heads: int

    @property
    def all_packed(self) -> list[Packed]:
        """Each matrix once."""
        packed = [self.embedding, *(matrix for layer in self.matrices for matrix in layer)]
        return packed if self.head is self.embedding else [*packed, self.head]


class _Collector:
    def __init__(self, model: PreTrainedModel, quantised: QuantisedWeights, kind: CpuWeights) -> None:
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.quantised, self.kind, self.arena = quantised, kind, Arena()

    def matrix(self, parameter: Tensor) -> Matrix:
        """A weight in its quantised form if it has one, else as float16."""
        name = self.names[id(parameter)]
        blocks = None if self.kind == "float16" else self.quantised.find(name)
        if blocks is not None and blocks.shape == tuple(parameter.shape):
            return blocks
        dense: NDArray[np.float16] = parameter.detach().to(torch.float16).cpu().numpy()
        return dense

    def packed(self, *modules: nn.Module) -> Packed:
        """The matrices of some modules as one; embeddings keep whole bytes, because single rows are read."""
        matrices = [self.matrix(_weight(module)) for module in modules]
        is_table = isinstance(modules[0], nn.Embedding)
        try:
            return self.arena.keep(pack(stack(matrices), four_bit=self.kind == "int4" and not is_table))
        except ValueError as error:
            raise NotLlamaLikeError(str(error)) from error


def collect(model: PreTrainedModel, quantised: QuantisedWeights, kind: CpuWeights) -> DecoderWeights:
    """The weights of a model with the common decoder structure. Raises NotLlamaLikeError.

    Whether the compiled decoder computes what the model does is for the caller to try.
    """
    collector = _Collector(model, quantised, kind)
    try:
        return _collect(model, model.get_decoder(), collector)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise NotLlamaLikeError(f"a part is missing: {error}") from error


def _collect(model: PreTrainedModel, decoder: Any, collector: _Collector) -> DecoderWeights:
    layers = list(decoder.layers)
    attention = layers[0].self_attn
    _check_sizes(model.config.hidden_size, layers, decoder.rotary_emb)
    embedding = collector.packed(decoder.embed_tokens)
    head: Any = model.get_output_embeddings()
    is_tied = head.weight.data_ptr() == decoder.embed_tokens.weight.data_ptr()
    norms = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    return DecoderWeights(
        embedding=embedding,
        matrices=tuple(_layer_matrices(layer, collector) for layer in layers),
        norms=np.stack([_floats(norm.weight) for norm in [*norms, decoder.norm]]),
        biases=_biases(layers),
        head_norms=_head_norms(layers, attention.head_dim),
        head=embedding if is_tied else collector.packed(head),
        head_bias=_bias([head]),
        eps=float(decoder.norm.variance_epsilon),
        scaling=float(attention.scaling),
        head_dim=attention.head_dim,
        num_kv_heads=attention.k_proj.out_features // attention.head_dim,
    )


def _check_sizes(hidden: int, layers: list[Any], rotary: Any) -> None:
    """Compiled code checks no bounds: every layer has the first one's sizes, and rotary embeddings fill its heads."""
    sizes = {_sizes(layer) for layer in layers}
    if len(sizes) > 1:
        raise NotLlamaLikeError("its layers differ in size.")
    width, head_dim, num_kv, out_inputs, out_outputs, inner, up, down_inputs, down_outputs = sizes.pop()
    fits = (out_outputs, down_outputs, up, down_inputs) == (hidden, hidden, inner, inner)
    if not fits or width != out_inputs + 2 * num_kv * head_dim or out_inputs % head_dim or head_dim % BLOCK:
        raise NotLlamaLikeError("its projections have other sizes.")
    if any(kind in str(getattr(rotary, "rope_type", "")) for kind in ("dynamic", "longrope")):
        raise NotLlamaLikeError("its rotary embeddings depend on the length of the text.")
    cos, _ = rotary(torch.zeros(1), position_ids=torch.zeros(1, 1, dtype=torch.long))
    if cos.shape[-1] != head_dim:
        raise NotLlamaLikeError("its rotary embeddings turn a part of each head.")


def _sizes(layer: Any) -> tuple[int, ...]:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return (
        sum(projection.out_features for projection in projections),
        attention.head_dim,
        attention.k_proj.out_features // attention.head_dim,
        attention.o_proj.in_features,
        attention.o_proj.out_features,
        mlp.gate_proj.out_features,
        mlp.up_proj.out_features,
        mlp.down_proj.in_features,
        mlp.down_proj.out_features,
    )


def _layer_matrices(layer: Any, collector: _Collector) -> tuple[Packed, Packed, Packed, Packed]:
    attention, mlp = layer.self_attn, layer.mlp
    return (
        collector.packed(attention.q_proj, attention.k_proj, attention.v_proj),
        collector.packed(attention.o_proj),
        collector.packed(mlp.gate_proj, mlp.up_proj),
        collector.packed(mlp.down_proj),
    )


def _biases(layers: list[Any]) -> tuple[Floats, Floats, Floats, Floats]:
    attentions, mlps = [layer.self_attn for layer in layers], [layer.mlp for layer in layers]
    return (
        np.stack([_bias([a.q_proj, a.k_proj, a.v_proj]) for a in attentions]),
        np.stack([_bias([a.o_proj]) for a in attentions]),
        np.stack([_bias([m.gate_proj, m.up_proj]) for m in mlps]),
        np.stack([_bias([m.down_proj]) for m in mlps]),
    )


def _bias(linears: list[Any]) -> Floats:
    """The biases of fused linears one after the other; empty when none has one."""
    if all(linear.bias is None for linear in linears):
        return np.zeros(0, np.float32)
    parts = [np.zeros(m.out_features, np.float32) if m.bias is None else _floats(m.bias) for m in linears]
    return np.concatenate(parts)


def _head_norms(layers: list[Any], head_dim: int) -> Floats:
    """Norms of queries and keys [L, 2, d]; [0, 2, d] for models without them."""
    if getattr(layers[0].self_attn, "q_norm", None) is None:
        return np.zeros((0, 2, head_dim), np.float32)
    pairs = [(layer.self_attn.q_norm, layer.self_attn.k_norm) for layer in layers]
    return np.stack([np.stack([_floats(q.weight), _floats(k.weight)]) for q, k in pairs])


def _weight(module: nn.Module) -> Tensor:
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        raise NotLlamaLikeError(f"{type(module).__name__} stands where a linear layer should.")
    return module.weight


def _floats(parameter: Tensor) -> Floats:
    values: Floats = parameter.detach().float().cpu().numpy()
    return values
