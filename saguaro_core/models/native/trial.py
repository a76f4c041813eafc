"""Makes a compiled runner of a transformers model, if it turns out to compute the same."""

import logging
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from saguaro_core.config import CpuWeights
from saguaro_core.errors import ModelError
from saguaro_core.models.native.blocks import QuantisedWeights
from saguaro_core.models.native.runner import NativeRunner
from saguaro_core.models.native.weights import NotLlamaLikeError, collect
from saguaro_core.models.runner import trunk_batch

logger = logging.getLogger(__name__)

_NUM_TOKENS, _NUM_FIRST, _NUM_COLUMNS = 7, 4, 4096
# Half-precision rounding of a whole model stays well below this share of the largest logit; another function does not.
_TOLERANCE = 0.02


def try_native(
    model: PreTrainedModel,
    quantised: QuantisedWeights,
    kind: CpuWeights,
    *,
    vocabulary_size: int,
    context_length: int,
    threads: int,
) -> NativeRunner | None:
    """A runner over the compiled decoder; None where the model has another structure or the two disagree.

    Call it before the model's attention or layers are replaced.
    """
    try:
        weights = collect(model, quantised, kind)
        decoder: Any = model.get_decoder()
        runner = NativeRunner(
            weights,
            decoder.rotary_emb,
            vocabulary_size=vocabulary_size,
            context_length=context_length,
            threads=threads,
        )
    except NotLlamaLikeError as error:
        logger.info("%s runs in torch: %s", type(model).__name__, error)
        return None
    try:
        agrees = _agrees(model, runner)
    except ModelError as error:
        logger.info("%s runs in torch: %s", type(model).__name__, error)
        return None
    if not agrees:
        logger.info("%s runs in torch: the compiled decoder gives other logits", type(model).__name__)
        return None
    return runner


def _agrees(model: PreTrainedModel, runner: NativeRunner) -> bool:
    """Both give the same logits for a few tokens, the last of them over a cache; the runner's cache is left dirty."""
    token_ids = torch.arange(1, 1 + _NUM_TOKENS) * 97 % runner.vocabulary_size
    first, rest = token_ids[:_NUM_FIRST].tolist(), token_ids[_NUM_FIRST:].tolist()
    parts = [
        runner.forward(trunk_batch(first, 0, len(first))),
        runner.forward(trunk_batch(rest, len(first), len(rest))),
    ]
    columns = torch.arange(0, runner.vocabulary_size, max(1, runner.vocabulary_size // _NUM_COLUMNS))
    found = torch.cat([part for part in parts if part is not None], dim=1)[0][:, columns]
    error = (found - _reference(model, token_ids, columns)).abs().max()
    return bool(error <= _TOLERANCE * found.abs().max())


class _InFloat32(nn.Module):
    """A layer computed in float32, whose copy lives as long as its forward: half precision is slow on CPUs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return deepcopy(self.layer).float()(hidden_states.float(), *args, **kwargs)


@torch.inference_mode()
def _reference(model: PreTrainedModel, token_ids: Tensor, columns: Tensor) -> Tensor:
    """Logits [n, len(columns)] as transformers computes them."""
    decoder: Any = model.get_decoder()
    head: Any = model.get_output_embeddings()
    layers = decoder.layers
    decoder.layers = nn.ModuleList(_InFloat32(layer) for layer in layers)
    try:
        hidden = decoder(input_ids=token_ids.unsqueeze(0), use_cache=False).last_hidden_state[0].float()
    finally:
        decoder.layers = layers
    bias = None if head.bias is None else head.bias[columns].float()
    return linear(hidden, head.weight[columns].float(), bias)
