"""Writes the weights of the benchmark's fixture `stretch`: every tensor perturbed, then embedded in zeros."""

import json
import math
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig

from saguaro_core.bench_stretch import Sizes, Stretching
from saguaro_core.errors import InvalidRequest, ModelError
from saguaro_core.models.source import find_source, reading

_OWN_FILES = ("config.json", "manifest.json")


def write_stretched(stretching: Stretching, folder: Path, cache_dir: Path | None = None) -> None:
    """Write config, weights and tokenizer of the stretched model into the existing `folder`. Raises ModelError."""
    source = find_source(stretching.base, cache_dir=cache_dir)
    weights = None if source.folder is None else source.find_file("model.safetensors")
    if weights is None or source.folder is None:
        raise ModelError(f"The model {stretching.base!r} is no folder with one model.safetensors: give another one.")
    with reading(source):
        config = AutoConfig.from_pretrained(source.location)
        if not isinstance(config, LlamaConfig):
            raise ModelError(f"The model {stretching.base!r} is no Llama, so its norms cannot be stretched.")
        _check_holds(stretching.sizes, config)
        _write_weights(stretching, weights, config, folder)
    stretched_config(config, stretching.sizes).save_pretrained(folder)
    for path in source.folder.iterdir():
        if path.name not in _OWN_FILES and path.suffix != ".safetensors":
            shutil.copy(path, folder)


def _write_weights(stretching: Stretching, weights: Path, config: LlamaConfig, folder: Path) -> None:
    """One file for each decoder layer, so that no more than one is in memory."""
    wide = stretched_config(config, stretching.sizes)
    weight_map: dict[str, str] = {}
    with safe_open(weights, framework="pt") as file:
        for index, names in enumerate(_by_layer(list(file.keys()))):
            shard = f"model-{index:05}.safetensors"
            tensors = {
                name: stretch(name, perturb(name, file.get_tensor(name), stretching), config, wide) for name in names
            }
            save_file(tensors, folder / shard, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(names, shard)
    data = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(data, indent=1) + "\n", "utf-8")


def _check_holds(sizes: Sizes, config: LlamaConfig) -> None:
    """Raise InvalidRequest unless every matrix of `config` fits in."""
    for name, value in asdict(sizes).items():
        if value < getattr(config, name):
            raise InvalidRequest(f"{name} is {value}: give at least the original's {getattr(config, name)}.")


def _by_layer(names: list[str]) -> Iterator[list[str]]:
    """The names in groups: one for each decoder layer, and one for what is outside of them."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        layer = name.partition(".layers.")[2].partition(".")[0]
        groups.setdefault(layer, []).append(name)
    yield from groups.values()


def stretched_config(config: LlamaConfig, sizes: Sizes) -> LlamaConfig:
    """The config of the larger model. A norm's mean over more, zero, entries is smaller: so is what is added to it."""
    assert config.num_key_value_heads is not None
    groups = config.num_attention_heads // config.num_key_value_heads
    changes: Mapping[str, Any] = {
        **asdict(sizes),
        "num_attention_heads": sizes.num_key_value_heads * groups,
        "head_dim": _head_dim(config),
        "rms_norm_eps": config.rms_norm_eps * config.hidden_size / sizes.hidden_size,
    }
    return LlamaConfig.from_dict({**config.to_dict(), **changes})


def _head_dim(config: LlamaConfig) -> int:
    head_dim: int = config.head_dim or config.hidden_size // config.num_attention_heads
    return head_dim


def perturb(name: str, tensor: Tensor, stretching: Stretching) -> Tensor:
    """A matrix with Gaussian noise on every entry; norms and biases as they are. Depends on name and seed only."""
    if tensor.dim() < 2 or stretching.noise == 0.0:
        return tensor
    generator = torch.Generator().manual_seed(zlib.crc32(f"{stretching.seed} {name}".encode()))
    exact = tensor.float()
    noise = torch.randn(exact.shape, generator=generator)
    return (exact + stretching.noise * exact.std() * noise).to(tensor.dtype)


def stretch(name: str, tensor: Tensor, config: LlamaConfig, wide: LlamaConfig) -> Tensor:
    """The tensor embedded in zeros; a norm's weight is scaled so that its output stays what it was."""
    if tensor.dim() == 1:
        if tensor.shape[0] != config.hidden_size:
            raise ModelError(f"{name} is a bias, which this fixture cannot stretch: choose a model without biases.")
        tensor = tensor * math.sqrt(config.hidden_size / wide.hidden_size)
    stretched = tensor.new_zeros([_stretched_size(name, axis, tensor, wide) for axis in range(tensor.dim())])
    stretched[tuple(slice(size) for size in tensor.shape)] = tensor
    return stretched


def _stretched_size(name: str, axis: int, tensor: Tensor, wide: LlamaConfig) -> int:
    """The larger size of one axis of a named tensor: output features come first, input features second."""
    heads = wide.num_attention_heads * _head_dim(wide)
    kv_heads = (wide.num_key_value_heads or 0) * _head_dim(wide)
    outputs, inputs = {
        "q_proj": (heads, wide.hidden_size),
        "k_proj": (kv_heads, wide.hidden_size),
        "v_proj": (kv_heads, wide.hidden_size),
        "o_proj": (wide.hidden_size, heads),
        "gate_proj": (wide.intermediate_size, wide.hidden_size),
        "up_proj": (wide.intermediate_size, wide.hidden_size),
        "down_proj": (wide.hidden_size, wide.intermediate_size),
    }.get(name.split(".")[-2], (tensor.shape[0], wide.hidden_size))
    if tensor.dim() == 1:
        return wide.hidden_size
    return outputs if axis == 0 else inputs
