"""x @ W.T for any number of rows: over packed weights, and over the keys and values of attention."""

import numpy as np
from numba import njit, prange

from saguaro_core.models.native.tile import BLOCK, FORMATS, MAX_ROWS, PAIR, make_pair

FLOAT, HALF, INT8, INT8_OFFSET, INT4_OFFSET = range(5)
"""Numbers of the formats, in the order of tile.FORMATS."""

_float_pair, _half_pair, _int8_pair, _int8_offset_pair, _int4_offset_pair = (make_pair(f) for f in FORMATS.values())
_BLOCK_BYTES = tuple(form.block_bytes for form in FORMATS.values())
_SCALE_BYTES = tuple(form.scale_bytes for form in FORMATS.values())


@njit(cache=True)
def _multiply_pairs(kind, weights, scales, x, sums, out, first, last):
    """Pairs of tiles first..last of the product. Rows go in groups that the registers hold, all of them in turn."""
    num_rows, n = x.shape[0], x.shape[1] // BLOCK
    groups = -(-num_rows // MAX_ROWS)
    dx, dt, do = x.strides[0], sums.strides[0], out.strides[0]
    stride = n * _BLOCK_BYTES[kind]
    for pair in range(first, last):
        w = weights + 2 * pair * stride
        s = scales + 2 * pair * n * _SCALE_BYTES[kind]
        for group in range(groups):
            row = group * num_rows // groups
            rows = (group + 1) * num_rows // groups - row
            xr, tr = x.ctypes.data + row * dx, sums.ctypes.data + row * dt
            o = out.ctypes.data + row * do + pair * PAIR * 4
            if kind == HALF:
                _half_pair(rows, w, stride, s, xr, dx, tr, dt, o, do, n)
            elif kind == INT8:
                _int8_pair(rows, w, stride, s, xr, dx, tr, dt, o, do, n)
            elif kind == INT8_OFFSET:
                _int8_offset_pair(rows, w, stride, s, xr, dx, tr, dt, o, do, n)
            else:
                _int4_offset_pair(rows, w, stride, s, xr, dx, tr, dt, o, do, n)


@njit(cache=True, fastmath=True)
def _sum_blocks(x, sums):
    for row in range(x.shape[0]):
        for block in range(x.shape[1] // BLOCK):
            total = np.float32(0.0)
            for i in range(BLOCK):
                total += x[row, block * BLOCK + i]
            sums[row, block] = total


@njit(cache=True)
def matmul(kind, weights, scales, x, sums, out):
    """out [m, N] = x [m, K] @ W.T, all float32; `weights` and `scales` are addresses of a packed matrix.

    sums [m, K / 32] is scratch. N and K are multiples of 32. A row of the result does not depend on the other rows.
    """
    _sum_blocks(x, sums)
    _multiply_pairs(kind, weights, scales, x, sums, out, 0, out.shape[1] // PAIR)


@njit(cache=True, parallel=True)
def matmul_parallel(kind, weights, scales, x, sums, out, num_threads):
    """The same with the tiles shared out between threads; every number has the same bits."""
    _sum_blocks(x, sums)
    num_pairs = out.shape[1] // PAIR
    for share in prange(num_threads):
        first, last = share * num_pairs // num_threads, (share + 1) * num_pairs // num_threads
        _multiply_pairs(kind, weights, scales, x, sums, out, first, last)


@njit(cache=True)
def multiply_floats(weights, tile_stride, x, num_inputs, out, num_pairs):
    """out [m, 32 * num_pairs] = x[:, :num_inputs] @ W.T for float32 tiles from an address on.

    The tiles are `tile_stride` bytes apart; num_inputs is a multiple of 32.
    """
    num_rows, n = x.shape[0], num_inputs // BLOCK
    groups = -(-num_rows // MAX_ROWS)
    dx, do = x.strides[0], out.strides[0]
    for pair in range(num_pairs):
        for group in range(groups):
            row = group * num_rows // groups
            rows = (group + 1) * num_rows // groups - row
            xr, o = x.ctypes.data + row * dx, out.ctypes.data + row * do + pair * PAIR * 4
            _float_pair(rows, weights + 2 * pair * tile_stride, tile_stride, 0, xr, dx, 0, 0, o, do, n)
