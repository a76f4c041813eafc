"""Drafts in this project's own small format: int8 matrices, a trimmed head, and the target's token embedding.

A folder in that format has `draft_head_size` in its config. Row i of the head scores the target's token
`head.token_ids[i]`; every other token has draft probability 0, which both verification rules allow.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from saguaro_core.errors import ModelError
from saguaro_core.models.source import ModelSource

_EMBEDDING = "model.embed_tokens.weight"
_SCALE = ".scale"
HEAD_NAMES = {"lm_head.weight": "head.weight"}
"""What the model calls a parameter, and what the file does, where they differ."""

_HEAD_SIZE = "draft_head_size"


@dataclass(frozen=True, slots=True)
class TrimmedDraft:
    """The model, whose logits go over the trimmed head, and the target's token id of every head row."""

    model: PreTrainedModel
    token_ids: torch.Tensor  # [head_size] int64


def is_trimmed_draft(source: ModelSource) -> bool:
    """Whether `source` is a folder in this format."""
    return source.folder is not None and _HEAD_SIZE in _read_config(source.folder)


def load_trimmed_draft(source: ModelSource, target: ModelSource, dtype: torch.dtype) -> TrimmedDraft:
    """Read the draft on the CPU. Raises ModelError when a shape is wrong or the target's embedding does not fit."""
    assert source.folder is not None
    raw = _read_config(source.folder)
    head_size = raw.pop(_HEAD_SIZE)
    config = LlamaConfig(**raw)
    embedding = read_embedding(target)
    _check_embedding(embedding, config, source, target)
    tensors = _read_dequantised(source.folder / "model.safetensors", dtype)
    head = {name: _take(tensors, name, source) for name in ("head.weight", "head.bias", "head.token_ids")}
    token_ids = head["head.token_ids"].to(torch.int64)
    _check_head(head, token_ids, head_size, config, source)
    model = _build(config, tensors, embedding.to(dtype), source)
    model.lm_head = _head_layer(head["head.weight"], head["head.bias"])
    return TrimmedDraft(model.eval(), token_ids)


def read_embedding(source: ModelSource) -> torch.Tensor:
    """The token embedding of a model, [vocabulary, hidden]; no other tensor of it is read."""
    path = source.find_file("model.safetensors")
    if path is None:
        path = _find_shard(source)
    with safe_open(path, framework="pt") as tensors:
        if _EMBEDDING not in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
            raise ModelError(f"The target {source.name!r} has no tensor {_EMBEDDING}, which the draft needs.")
        return cast(torch.Tensor, tensors.get_tensor(_EMBEDDING))


def _find_shard(source: ModelSource) -> Path:
    index = source.find_file("model.safetensors.index.json")
    shard = None if index is None else json.loads(index.read_text("utf-8"))["weight_map"].get(_EMBEDDING)
    path = None if shard is None else source.find_file(shard)
    if path is None:
        raise ModelError(
            f"The draft needs the token embedding of the target {source.name!r}, but no safetensors file with "
            f"{_EMBEDDING} was found. Choose another draft, or a target stored as safetensors."
        )
    return path


def _read_config(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    return data


def _read_dequantised(path: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every tensor of the file; an int8 matrix becomes int8 * the scale of its row."""
    with safe_open(path, framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
    result = {}
    for name, tensor in stored.items():
        if name.endswith(_SCALE):
            continue
        if name + _SCALE in stored:
            tensor = tensor.float() * stored[name + _SCALE].float()[:, None]
        result[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return result


def _take(tensors: dict[str, torch.Tensor], name: str, source: ModelSource) -> torch.Tensor:
    if name not in tensors:
        raise ModelError(f"The draft {source.name!r} lacks the tensor {name}. Its model.safetensors is incomplete.")
    return tensors.pop(name)


def _check_embedding(embedding: torch.Tensor, config: LlamaConfig, source: ModelSource, target: ModelSource) -> None:
    wanted = (config.vocab_size, config.hidden_size)
    if tuple(embedding.shape) != wanted:
        raise ModelError(
            f"The draft {source.name!r} was made for a target with a token embedding of shape {wanted}; "
            f"{target.name!r} has {tuple(embedding.shape)}. Use it with its own target, or choose another draft."
        )


def _check_head(
    head: dict[str, torch.Tensor], token_ids: torch.Tensor, head_size: int, config: LlamaConfig, source: ModelSource
) -> None:
    wanted = {
        "head.weight": (head_size, config.hidden_size),
        "head.bias": (head_size,),
        "head.token_ids": (head_size,),
    }
    for name, shape in wanted.items():
        if tuple(head[name].shape) != shape:
            raise ModelError(
                f"The draft {source.name!r} has {name} of shape {tuple(head[name].shape)}; its config asks for {shape}."
            )
    ascending = bool((token_ids.diff() > 0).all())
    if not ascending or int(token_ids[0]) < 0 or int(token_ids[-1]) >= config.vocab_size:
        raise ModelError(
            f"The draft {source.name!r} has head.token_ids that are not ascending ids below {config.vocab_size}."
        )


def _build(
    config: LlamaConfig, tensors: dict[str, torch.Tensor], embedding: torch.Tensor, source: ModelSource
) -> LlamaForCausalLM:
    """The model with a tied head, so that no full-size head is ever allocated; the caller replaces it."""
    config.tie_word_embeddings = True
    loaded: Any = LlamaForCausalLM.from_pretrained(
        None,
        config=config,
        state_dict={**tensors, _EMBEDDING: embedding},
        dtype=embedding.dtype,
        output_loading_info=True,
    )
    model, report = loaded
    model.config.tie_word_embeddings = False
    check_complete(report, source)
    return cast(LlamaForCausalLM, model)


def check_complete(report: dict[str, Any], source: ModelSource) -> None:
    """transformers fills missing weights with random numbers; here that is an error."""
    for problem in ("missing_keys", "mismatched_keys"):
        names = sorted(str(name) for name in report.get(problem) or ())
        if names:
            raise ModelError(
                f"The model {source.name!r} is incomplete or damaged: {len(names)} tensors are "
                f"{problem.removesuffix('_keys')}, {names[0]} first. Fetch it again."
            )


def _head_layer(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=True, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=False)
    return layer
