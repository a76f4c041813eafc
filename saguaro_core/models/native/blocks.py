"""Quantised weights as their file has them: codes, scales and offsets, never rounded to another type.

A converted GGUF model keeps them in `blocks.safetensors` beside its half-precision weights; a trimmed draft's own
file is int8 with one scale for each row.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors import safe_open

from saguaro_core.models.native.packing import Blocks
from saguaro_core.models.native.tile import BLOCK

BLOCKS_FILE = "blocks.safetensors"

CODES, SCALE, OFFSET = ".codes", ".scale", ".offset"


class QuantisedWeights(Protocol):
    """Finds the quantised form of a parameter."""

    def find(self, name: str) -> Blocks | None:
        """The blocks of the matrix that transformers calls `name`; None when it is not stored so."""
        ...


class NoQuantisedWeights:
    """A model of plain floats."""

    def find(self, name: str) -> Blocks | None:
        """Nothing is quantised."""
        return None


class BlocksFile:
    """The blocks of a converted GGUF file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def find(self, name: str) -> Blocks | None:
        """Read one matrix; others stay on disk."""
        with safe_open(self._path, framework="np") as file:
            names = set(file.keys())
            if name + CODES not in names:
                return None
            offset = file.get_tensor(name + OFFSET) if name + OFFSET in names else None
            return Blocks(file.get_tensor(name + CODES), file.get_tensor(name + SCALE), offset)


class RowScaledFile:
    """int8 matrices with one float16 scale for each row (`NAME` and `NAME.scale`); `renamed` maps names to stored
    ones.
    """

    def __init__(self, path: Path, renamed: Mapping[str, str], others: QuantisedWeights) -> None:
        self._path, self._renamed, self._others = path, renamed, others

    def find(self, name: str) -> Blocks | None:
        """Read one matrix; what this file lacks is looked for in the others."""
        stored = self._renamed.get(name, name)
        with safe_open(self._path, framework="np") as file:
            if stored + SCALE not in file.keys():  # noqa: SIM118 - safe_open is no mapping
                return self._others.find(name)
            codes, scale = file.get_tensor(stored), file.get_tensor(stored + SCALE)
        blocks = np.repeat(scale.astype(np.float16)[:, None], codes.shape[1] // BLOCK, axis=1)
        return Blocks(codes, blocks) if codes.shape[1] % BLOCK == 0 else None
