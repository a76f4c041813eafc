"""Attention as two products over the cache, which is kept in the layout that they read.

keys: float32 [rows, kv_h, slots / 16, d, 16], values: [rows, kv_h, d / 16, slots, 16], for one layer. A product
over all slots in use needs no gathering; what a token must not see gets weight 0, which changes no bit of the sum.
"""

import numpy as np
from numba import njit

from saguaro_core.models.native.matmul import multiply_floats
from saguaro_core.models.native.steps import softmax
from saguaro_core.models.native.tile import BLOCK, PAIR, TILE


@njit(cache=True)
def store(heads, num_heads, rows, slots, keys, values):
    """Write the keys and values behind the query heads of heads [m, h + 2 kv_h, d] to each token's row and slot."""
    num_kv, head_dim = keys.shape[1], keys.shape[3]
    for t in range(heads.shape[0]):
        row, tile, lane = rows[t], slots[t] // TILE, slots[t] % TILE
        for kv in range(num_kv):
            for i in range(head_dim):
                keys[row, kv, tile, i, lane] = heads[t, num_heads + kv, i]
                values[row, kv, i // TILE, slots[t], i % TILE] = heads[t, num_heads + num_kv + kv, i]


@njit(cache=True)
def _spread(scores, prefix, extra, num_extra, scaling, packed, used):
    """Turn scores [used] of one query into weights: a softmax over what it sees, 0 elsewhere."""
    for i in range(prefix):
        packed[i] = scaling * scores[i]
    for e in range(num_extra):
        packed[prefix + e] = scaling * scores[extra[e]]
    softmax(packed, prefix + num_extra)
    for i in range(prefix):
        scores[i] = packed[i]
    for i in range(prefix, used):
        scores[i] = np.float32(0.0)
    for e in range(num_extra):
        scores[extra[e]] = packed[prefix + e]


@njit(cache=True)
def _attend_row(heads, first, last, num_heads, keys, values, prefix, extra, num_extra, scaling, out):
    """The tokens first..last, which share one row of the cache: keys [kv_h, ...], values [kv_h, ...]."""
    num_kv, head_dim = keys.shape[0], keys.shape[2]
    group, m = num_heads // num_kv, last - first
    used = 0
    for t in range(first, last):
        used = max(used, prefix[t])
        for e in range(num_extra[t]):
            used = max(used, extra[t, e] + 1)
    used = -(-used // PAIR) * PAIR
    query, mixed = np.empty((m * group, head_dim), np.float32), np.empty((m * group, head_dim), np.float32)
    scores, packed = np.empty((m * group, used), np.float32), np.empty(used, np.float32)
    for kv in range(num_kv):
        for t in range(m):
            for g in range(group):
                query[t * group + g] = heads[first + t, kv * group + g]
        multiply_floats(keys[kv].ctypes.data, 4 * TILE * head_dim, query, head_dim, scores, used // PAIR)
        for t in range(m):
            near, far = prefix[first + t], num_extra[first + t]
            for g in range(group):
                _spread(scores[t * group + g], near, extra[first + t], far, scaling, packed, used)
        multiply_floats(values[kv].ctypes.data, values.strides[1], scores, used, mixed, head_dim // PAIR)
        for t in range(m):
            for g in range(group):
                out[first + t, kv * group + g] = mixed[t * group + g]


@njit(cache=True)
def attend(heads, num_heads, keys, values, rows, prefix, extra, num_extra, scaling, out):
    """Grouped attention of the first heads [m, :num_heads, d]; out is [m, num_heads, d].

    Token t looks into cache row rows[t] (tokens of a row follow each other): at its first prefix[t] slots, at least
    one, and at the num_extra[t] slots in extra[t], which are ascending.
    """
    first = 0
    for t in range(1, heads.shape[0] + 1):
        if t == heads.shape[0] or rows[t] != rows[first]:
            row = rows[first]
            _attend_row(heads, first, t, num_heads, keys[row], values[row], prefix, extra, num_extra, scaling, out)
            first = t


assert PAIR == BLOCK  # The slots in use are the outputs of one product and the inputs of the other.
