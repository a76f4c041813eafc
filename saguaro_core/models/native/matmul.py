"""x @ W.T for any number of rows: over packed weights, and over the keys and values of attention."""

import numpy as np
from numba import njit, prange

from saguaro_core.models.native.tile import BLOCK, FORMATS, MAX_ROWS, PAIR, make_pair

FLOAT, HALF, INT8, INT8_OFFSET, INT4_OFFSET = range(5)
"""Numbers of the formats, in the order of tile.FORMATS."""

_float_pair, _half_pair, _int8_pair, _int8_offset_pair, _int4_offset_pair = (make_pair(f) for f in FORMATS.values())
_BLOCK_BYTES = tuple(form.block_bytes for form in FORMATS.values())
_SCALE_BYTES = tuple(form.scale_bytes for form in FORMATS.values())
_LARGEST_INPUT = 32767.0


@njit(cache=True)
def _multiply_pairs(kind, weights, scales, x, n, x_blocks, out, first, last):
    """Pairs of tiles first..last of the product. Rows go in groups that the registers hold, all of them in turn.

    x: bytes of its n blocks, whatever their type: the code for all formats is long, and so is compiled only once.
    """
    num_rows = x.shape[0]
    groups = -(-num_rows // MAX_ROWS)
    dx, db, do = x.strides[0], x_blocks.strides[0], out.strides[0]
    stride = n * _BLOCK_BYTES[kind]
    for pair in range(first, last):
        w = weights + 2 * pair * stride
        s = scales + 2 * pair * n * _SCALE_BYTES[kind]
        for group in range(groups):
            row = group * num_rows // groups
            rows = (group + 1) * num_rows // groups - row
            xr, b = x.ctypes.data + row * dx, x_blocks.ctypes.data + row * db
            o = out.ctypes.data + row * do + pair * PAIR * 4
            if kind == HALF:
                _half_pair(rows, w, stride, s, xr, dx, b, db, o, do, n)
            elif kind == INT8:
                _int8_pair(rows, w, stride, s, xr, dx, b, db, o, do, n)
            elif kind == INT8_OFFSET:
                _int8_offset_pair(rows, w, stride, s, xr, dx, b, db, o, do, n)
            else:
                _int4_offset_pair(rows, w, stride, s, xr, dx, b, db, o, do, n)


@njit(cache=True, fastmath={"reassoc", "contract", "arcp"}, error_model="numpy")  # NaN must stay NaN.
def _quantise_block(x, codes, scale_and_sum):
    """int16 codes of one block, its scale and its sum; a block of zeros has scale 0, one with NaN has scale NaN."""
    largest, total = np.float32(0.0), np.float32(0.0)
    for i in range(BLOCK):
        largest = max(largest, abs(x[i]))
        total += x[i]
    if np.isnan(total):
        largest = total
    inverse = np.float32(0.0) if largest == np.float32(0.0) else np.float32(_LARGEST_INPUT) / largest
    for i in range(BLOCK):
        value = x[i] * inverse
        codes[i] = np.int16(np.int32(value + (np.float32(0.5) if value > np.float32(0.0) else np.float32(-0.5))))
    scale_and_sum[0], scale_and_sum[1] = largest / np.float32(_LARGEST_INPUT), total


@njit(cache=True)
def _quantise(x):
    """x [m, K] as int16 [m, K] with scale and sum of each block [m, K / 32, 2]."""
    num_rows, num_blocks = x.shape[0], x.shape[1] // BLOCK
    codes, x_blocks = np.empty(x.shape, np.int16), np.empty((num_rows, num_blocks, 2), np.float32)
    for row in range(num_rows):
        for block in range(num_blocks):
            inputs = slice(block * BLOCK, (block + 1) * BLOCK)
            _quantise_block(x[row, inputs], codes[row, inputs], x_blocks[row, block])
    return codes, x_blocks


@njit(cache=True)
def _read_as(kind, x):
    """x [m, K] as the product reads it: bytes of each row and, of integers, scale and sum of each block."""
    if kind == HALF:
        return x.view(np.uint8), np.empty((x.shape[0], 0, 2), np.float32)
    codes, x_blocks = _quantise(x)
    return codes.view(np.uint8), x_blocks


@njit(cache=True)
def matmul(kind, weights, scales, x, out):
    """out [m, N] = x [m, K] @ W.T, both float32; `weights` and `scales` are addresses of a packed matrix.

    N and K are multiples of 32. A row of the result does not depend on the other rows.
    """
    x_bytes, x_blocks = _read_as(kind, x)
    first, last = np.int64(0), out.shape[1] // PAIR  # A plain 0 would be a type of its own, and compile once more.
    _multiply_pairs(kind, weights, scales, x_bytes, x.shape[1] // BLOCK, x_blocks, out, first, last)


@njit(cache=True, parallel=True)
def matmul_parallel(kind, weights, scales, x, out, num_threads):
    """The same with the tiles shared out between threads; every number has the same bits."""
    num_pairs, num_blocks = out.shape[1] // PAIR, x.shape[1] // BLOCK
    x_bytes, x_blocks = _read_as(kind, x)
    for share in prange(num_threads):
        first, last = share * num_pairs // num_threads, (share + 1) * num_pairs // num_threads
        _multiply_pairs(kind, weights, scales, x_bytes, num_blocks, x_blocks, out, first, last)


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
