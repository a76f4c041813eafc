"""Products of the compiled decoder in every format; as a program, compiled for registers of another width.

python tests/native_products.py wide|narrow CACHE_FOLDER OUTPUT.npz
"""

import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

NUM_ROWS = 15
OUTPUTS, INPUTS = 72, 96  # Two whole pairs of tiles and a part of one.


def _pretend(width: str, cache_folder: str) -> None:
    """Before the product is imported: let it find this processor `wide` or `narrow`, and keep its code elsewhere."""
    import numba

    numba.config.CACHE_DIR = cache_folder  # type: ignore[attr-defined]
    with patch("llvmlite.binding.get_host_cpu_features", return_value={"avx512f": width == "wide"}):
        from saguaro_core.models.native.emitter import IS_WIDE
    assert (width == "wide") == IS_WIDE


def make_products() -> dict[str, NDArray[np.float32]]:
    """[NUM_ROWS, OUTPUTS] of each format, for the same inputs whoever asks."""
    from saguaro_core.models.native.matmul import matmul
    from saguaro_core.models.native.packing import Blocks, Matrix, pack
    from saguaro_core.models.native.tile import PAIR

    random = np.random.default_rng(0)
    x = random.standard_normal((NUM_ROWS, INPUTS)).astype(np.float32)
    scale = random.random((OUTPUTS, INPUTS // 32)).astype(np.float16)
    offset = random.standard_normal(scale.shape).astype(np.float16)
    four_bits = random.integers(0, 16, (OUTPUTS, INPUTS)).astype(np.int8)
    matrices: dict[str, tuple[Matrix, bool]] = {
        "half": (random.standard_normal((OUTPUTS, INPUTS)).astype(np.float16), False),
        "int8": (Blocks(random.integers(-128, 128, (OUTPUTS, INPUTS)).astype(np.int8), scale), False),
        "int8_offset": (Blocks(four_bits, scale, offset), False),
        "int4_offset": (Blocks(four_bits, scale, offset), True),
    }
    products = {}
    for name, (matrix, four_bit) in matrices.items():
        packed = pack(matrix, four_bit=four_bit)
        out = np.full((NUM_ROWS, -(-OUTPUTS // PAIR) * PAIR), np.nan, np.float32)
        matmul(packed.kind, packed.codes.ctypes.data, packed.scales.ctypes.data, x, out)
        products[name] = out[:, :OUTPUTS]
    return products


if __name__ == "__main__":
    _pretend(sys.argv[1], sys.argv[2])
    np.savez(Path(sys.argv[3]), **make_products())  # type: ignore[arg-type]
