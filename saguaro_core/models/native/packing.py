"""Weights in the layout of the compiled product: tiles of 16 outputs, in each the inputs in order.

Codes and scales keep their values; packing only moves them.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saguaro_core.models.native.tile import BLOCK, FORMATS, PAIR, TILE

_HIGHEST_4_BIT = 15
_ALIGNMENT = 64
_ARENA_BYTES = 32 << 20
_KINDS = {name: kind for kind, name in enumerate(FORMATS)}
_SHOWN = {"float": "float32", "half": "float16", "int8": "int8", "int8_offset": "int8", "int4_offset": "int4"}
KIND_NAMES = tuple(_SHOWN[name] for name in FORMATS)
"""How the weights of each format are called."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantised matrix [N, K]: weight = scale * code + offset, with one scale and offset for 32 inputs of an output.

    codes: int8 [N, K]. scale, offset: float16 [N, K / 32]; offset is None where it is 0 everywhere.
    """

    codes: NDArray[np.int8]
    scale: NDArray[np.float16]
    offset: NDArray[np.float16] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def dense(self) -> NDArray[np.float32]:
        """The same matrix as float32 [N, K]."""
        dense = self.codes.astype(np.float32) * np.repeat(self.scale.astype(np.float32), BLOCK, axis=1)
        return dense if self.offset is None else dense + np.repeat(self.offset.astype(np.float32), BLOCK, axis=1)


Matrix = Blocks | NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed matrix: bytes of its codes, bytes of its scales (empty for float16), and its shape before padding."""

    kind: int
    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    num_outputs: int
    num_inputs: int

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def stack(matrices: list[Matrix]) -> Matrix:
    """Several matrices of the same inputs as one, outputs in the given order."""
    blocks = [matrix for matrix in matrices if isinstance(matrix, Blocks)]
    if len(blocks) < len(matrices):
        return np.concatenate([m.dense().astype(np.float16) if isinstance(m, Blocks) else m for m in matrices])
    offsets = None
    if any(block.offset is not None for block in blocks):
        offsets = np.concatenate([np.zeros_like(b.scale) if b.offset is None else b.offset for b in blocks])
    return Blocks(np.concatenate([b.codes for b in blocks]), np.concatenate([b.scale for b in blocks]), offsets)


def pack(matrix: Matrix, *, four_bit: bool = False) -> Packed:
    """Pack for the tile product; `four_bit` stores two codes in a byte where all of them fit.

    Outputs are padded with zeros to whole pairs of tiles. Raises ValueError if the inputs are not a multiple of 32.
    """
    if matrix.shape[1] % BLOCK:
        raise ValueError(f"a matrix has {matrix.shape[1]} inputs: packing needs a multiple of {BLOCK}.")
    if not isinstance(matrix, Blocks):
        return _packed("half", _tiles(matrix), np.empty(0, np.float16), matrix.shape)
    codes = _tiles(matrix.codes)
    if matrix.offset is None:
        return _packed("int8", _paired(codes), _tiles(matrix.scale), matrix.shape)
    scales = np.stack([_tiles(matrix.scale), _tiles(matrix.offset)], axis=2)
    if four_bit and codes.min() >= 0 and codes.max() <= _HIGHEST_4_BIT:
        pairs = _paired(codes)
        return _packed("int4_offset", pairs[:, 0::2] | (pairs[:, 1::2] << 4), scales, matrix.shape)
    return _packed("int8_offset", _paired(codes), scales, matrix.shape)


def _paired(tiles: NDArray[np.int8]) -> NDArray[np.int8]:
    """[tiles, K, 16] as [tiles, K / 2, 16, 2]: two inputs of an output side by side."""
    return np.ascontiguousarray(tiles.reshape(len(tiles), -1, 2, TILE).swapaxes(2, 3))


def _tiles(matrix: NDArray[Any]) -> NDArray[Any]:
    """[N, K] as [tiles, K, 16], zeros after the last output up to a whole pair of tiles."""
    padded = np.zeros((-(-matrix.shape[0] // PAIR) * PAIR, matrix.shape[1]), matrix.dtype)
    padded[: matrix.shape[0]] = matrix
    return np.ascontiguousarray(padded.reshape(-1, TILE, matrix.shape[1]).transpose(0, 2, 1))


def _packed(name: str, codes: NDArray[np.generic], scales: NDArray[np.generic], shape: tuple[int, ...]) -> Packed:
    return Packed(_KINDS[name], codes.reshape(-1).view(np.uint8), scales.reshape(-1).view(np.uint8), shape[0], shape[1])


def unpack_rows(packed: Packed, outputs: NDArray[np.int64]) -> NDArray[np.float32]:
    """The weights of some outputs, [len(outputs), K]: a look-up in an embedding, whose codes are whole bytes."""
    tile, lane = outputs // TILE, outputs % TILE
    if packed.kind == _KINDS["half"]:
        halves = packed.codes.view(np.float16).reshape(-1, packed.num_inputs, TILE)
        return np.ascontiguousarray(halves[tile, :, lane], np.float32)
    codes = packed.codes.view(np.int8).reshape(-1, packed.num_inputs // 2, TILE, 2)
    scales = packed.scales.view(np.float16).reshape(len(codes), packed.num_inputs // BLOCK, -1, TILE)
    offset = scales[tile, :, 1, lane] if scales.shape[2] > 1 else None
    blocks = Blocks(codes[tile, :, lane].reshape(len(outputs), -1), scales[tile, :, 0, lane], offset)
    return np.ascontiguousarray(blocks.dense())


class Arena:
    """A few large buffers that matrices are moved into: their large pages cost fewer address lookups than many small
    ones, and what was packed is free again before the next matrix is.
    """

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def keep(self, packed: Packed) -> Packed:
        """The same matrix, in the arena."""
        return replace(packed, codes=self._place(packed.codes), scales=self._place(packed.scales))

    def _place(self, part: NDArray[np.uint8]) -> NDArray[np.uint8]:
        size = -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._free):
            self._free = np.empty(max(size, _ARENA_BYTES), np.uint8)
        place, self._free = self._free[: part.nbytes], self._free[size:]
        place[:] = part
        return place
