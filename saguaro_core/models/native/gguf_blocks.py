"""Takes the quantised matrices out of a GGUF file, under transformers' names and in transformers' order of rows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from numpy.typing import NDArray
from safetensors.numpy import save_file

from saguaro_core.models.native.blocks import CODES, OFFSET, SCALE
from saguaro_core.models.native.packing import Blocks

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}


def write_blocks(gguf_path: Path, dense: Mapping[str, NDArray[np.float16]], path: Path) -> None:
    """Store the quantised matrices of a GGUF file under transformers' names.

    `dense` are the same weights as transformers read them: a matrix is kept only if its blocks give exactly those
    numbers, which also tells whether its rows were reordered for rotary embeddings.
    """
    stored: dict[str, NDArray[Any]] = {}
    for tensor in GGUFReader(str(gguf_path)).tensors:
        name = _parameter_name(tensor.name)
        blocks = _read(tensor.tensor_type, tensor.data) if name in dense else None
        blocks = None if blocks is None or name is None else _in_order(blocks, dense[name], tensor.name)
        if blocks is not None and name is not None:
            stored[name + CODES], stored[name + SCALE] = blocks.codes, blocks.scale
            if blocks.offset is not None:
                stored[name + OFFSET] = blocks.offset
    save_file(stored, path)


def _parameter_name(gguf_name: str) -> str | None:
    if gguf_name in _OUTER_NAMES:
        return _OUTER_NAMES[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER_NAMES:
        return None
    return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"


def _read(kind: GGMLQuantizationType, data: NDArray[Any]) -> Blocks | None:
    """Codes and scales of the formats with blocks of 32; other formats stay in half precision."""
    if kind is GGMLQuantizationType.Q8_0:
        scale, codes = _split(data, 34, 2)
        return Blocks(codes.view(np.int8).reshape(len(data), -1), _halves(scale))
    if kind is GGMLQuantizationType.Q4_0:
        scale, packed = _split(data, 18, 2)
        return Blocks(_nibbles(packed), _halves(scale), _halves(scale) * np.float16(-8.0))
    if kind is GGMLQuantizationType.Q4_1:
        head, packed = _split(data, 20, 4)
        return Blocks(_nibbles(packed), _halves(head[..., :2]), _halves(head[..., 2:]))
    return None


def _split(data: NDArray[Any], size: int, head: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Rows of blocks of `size` bytes: their first `head` bytes, and the rest."""
    blocks = data.reshape(len(data), -1, size)
    return np.ascontiguousarray(blocks[..., :head]), np.ascontiguousarray(blocks[..., head:])


def _halves(data: NDArray[np.uint8]) -> NDArray[np.float16]:
    return np.ascontiguousarray(data).view(np.float16)[..., 0]


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.int8]:
    """16 bytes are 32 codes: the low halves first."""
    codes = np.concatenate([packed & 15, packed >> 4], axis=-1)
    return codes.reshape(len(packed), -1).view(np.int8)


def _in_order(blocks: Blocks, dense: NDArray[np.float16], gguf_name: str) -> Blocks | None:
    """The blocks with their rows as transformers has them; None if they are other numbers."""
    rotary = ".attn_q." in gguf_name or ".attn_k." in gguf_name
    for order in _row_orders(len(dense)) if rotary else [np.arange(len(dense))]:
        offset = None if blocks.offset is None else blocks.offset[order]
        candidate = Blocks(blocks.codes[order], blocks.scale[order], offset)
        if np.array_equal(candidate.dense().astype(np.float16), dense):
            return candidate
    return None


def _row_orders(num_rows: int) -> list[NDArray[np.intp]]:
    """As stored, and with the pairs of each rotary head taken apart, for each possible head size."""
    rows = np.arange(num_rows)
    sizes = [size for size in (32, 64, 80, 96, 128, 256) if num_rows % size == 0]
    return [rows, *(rows.reshape(-1, size // 2, 2).swapaxes(1, 2).reshape(-1) for size in sizes)]
