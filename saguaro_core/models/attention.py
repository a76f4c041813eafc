"""Grouped attention over the slots in use, registered with transformers' AttentionInterface.

Query heads that share a key-value head are folded into rows, so repeated keys are never materialised. The mask
comes ready from the runner; without one every query sees every slot in use.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from saguaro_core.errors import ModelError

ATTENTION_NAME = "saguaro_slotted"


def fold_mask(visible: Tensor, num_groups: int, dtype: torch.dtype) -> Tensor:
    """What to add to the scores of folded query rows: [b, 1, groups * n, used], 0 where `visible` [b, n, used], else
    -inf.

    Made once per forward, because attention would turn a boolean mask into this again in every layer.
    """
    hidden = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
    return hidden.repeat(1, num_groups, 1).unsqueeze(1)


def slotted_attention(
    module: nn.Module,
    query: Tensor,  # [b, heads, n, head_dim]
    key: Tensor,  # [b, kv_heads, used, head_dim]
    value: Tensor,  # [b, kv_heads, used, head_dim]
    attention_mask: Tensor | None,  # [b, 1, groups * n, used], added to the scores
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention output [b, n, heads, head_dim]; the second value (weights) is not computed."""
    unsupported = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if unsupported:
        raise ModelError(f"the model's attention uses {', '.join(unsupported)}: models without it are supported.")
    batch, heads, num_queries, head_dim = query.shape
    kv_heads = key.shape[1]
    folded = query.reshape(batch, kv_heads, heads // kv_heads * num_queries, head_dim)
    out = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return out.view(batch, heads, num_queries, -1).transpose(1, 2), None


def use_slotted_attention(model: PreTrainedModel) -> None:
    """Make a model attend through `slotted_attention`; doing it again is harmless."""
    AttentionInterface.register(ATTENTION_NAME, slotted_attention)
    model.set_attn_implementation(ATTENTION_NAME)


def num_query_groups(config: Any) -> int:
    """Query heads for each key-value head."""
    heads: int = config.num_attention_heads
    return heads // (getattr(config, "num_key_value_heads", None) or heads)
