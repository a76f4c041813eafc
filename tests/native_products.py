"""Matrices of every format and their products; as a program, compiled for registers of another width.

python tests/native_products.py wide|narrow CACHE_FOLDER OUTPUT.npz
"""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

OUTPUTS, INPUTS = 72, 96  # Two whole pairs of tiles and a part of one.
MOST_ROWS = 15
FORMATS = (("half", False), ("int8", False), ("offset", False), ("offset", True))
"""Kinds of matrices, and whether two codes share a byte."""


def make_matrix(kind: str, seed: int = 0) -> Any:
    """A random matrix [OUTPUTS, INPUTS]."""
    from saguaro_core.models.native.packing import Blocks

    random = np.random.default_rng(seed)
    if kind == "half":
        return random.standard_normal((OUTPUTS, INPUTS)).astype(np.float16)
    scale = random.random((OUTPUTS, INPUTS // 32)).astype(np.float16)
    if kind == "int8":
        return Blocks(random.integers(-128, 128, (OUTPUTS, INPUTS)).astype(np.int8), scale)
    offset = random.standard_normal(scale.shape).astype(np.float16)
    return Blocks(random.integers(0, 16, (OUTPUTS, INPUTS)).astype(np.int8), scale, offset)


def multiply(matrix: Any, x: NDArray[np.float32], *, four_bit: bool = False, threads: int = 0) -> NDArray[np.float32]:
    """The compiled x @ W.T, [m, OUTPUTS]."""
    from saguaro_core.models.native.matmul import matmul, matmul_parallel
    from saguaro_core.models.native.packing import pack
    from saguaro_core.models.native.tile import PAIR

    packed = pack(matrix, four_bit=four_bit)
    out = np.full((len(x), -(-OUTPUTS // PAIR) * PAIR), np.nan, np.float32)
    places = (packed.kind, packed.codes.ctypes.data, packed.scales.ctypes.data, x, out)
    if threads:
        matmul_parallel(*places, threads)
    else:
        matmul(*places)
    return out[:, :OUTPUTS]


def multiply_strided(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """x @ W.T for float32 tiles that lie further apart than they are long, as the cache of attention does: [m, 64]."""
    from saguaro_core.models.native.matmul import multiply_floats
    from saguaro_core.models.native.tile import PAIR, TILE

    tiles = np.random.default_rng(7).standard_normal((2 * PAIR // TILE, 2 * INPUTS, TILE)).astype(np.float32)
    out = np.full((len(x), 2 * PAIR), np.nan, np.float32)
    multiply_floats(tiles.ctypes.data, tiles.strides[0], x, INPUTS, out, 2)
    return out


def make_products() -> dict[str, NDArray[np.float32]]:
    """Products of every format with 1 to MOST_ROWS rows."""
    x = np.random.default_rng(1).standard_normal((MOST_ROWS, INPUTS)).astype(np.float32)
    products = {}
    for rows in range(1, MOST_ROWS + 1):
        products[f"float {rows}"] = multiply_strided(x[:rows])
        for kind, four_bit in FORMATS:
            products[f"{kind} {four_bit} {rows}"] = multiply(make_matrix(kind), x[:rows], four_bit=four_bit)
    return products


def _pretend(width: str, cache_folder: str) -> None:
    """Before the product is imported: let it find registers of a width, and keep its code away from everybody's."""
    import numba

    with patch("numba.core.codegen.get_host_cpu_features", return_value="+avx512f" if width == "wide" else ""):
        from saguaro_core.models.native.emitter import IS_WIDE
    assert (width == "wide") == IS_WIDE
    numba.config.CACHE_DIR = cache_folder  # type: ignore[attr-defined]  # The import above set the usual one.


if __name__ == "__main__":
    _pretend(sys.argv[1], sys.argv[2])
    np.savez(Path(sys.argv[3]), **make_products())  # type: ignore[arg-type]
