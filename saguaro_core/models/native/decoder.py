"""A forward of a Llama-like decoder as two compiled functions, any number of layers and the head: no step within them
returns to Python.
"""

import numpy as np
from numba import njit

from saguaro_core.models.native.attention import attend, store
from saguaro_core.models.native.matmul import matmul, matmul_parallel
from saguaro_core.models.native.steps import add, gate, rms_norm, rotate
from saguaro_core.models.native.tile import PAIR

QKV, OUT, GATE_UP, DOWN = range(4)
"""The matrices of a layer, in the order of the tables."""


@njit(cache=True)
def _product(matrix, x, bias, out, threads):
    """out = x @ W.T + bias; `matrix` is (format, address of the weights, address of the scales)."""
    if threads is None:  # Resolved when this compiles: one core never loads a thread pool.
        matmul(matrix[0], matrix[1], matrix[2], x, out)
    else:
        matmul_parallel(matrix[0], matrix[1], matrix[2], x, out, threads)
    if bias.shape[0]:
        for row in range(out.shape[0]):
            for i in range(bias.shape[0]):
                out[row, i] += bias[i]


@njit(cache=True)
def _attention(
    h,
    layer,
    matrices,
    biases,
    head_norms,
    eps,
    scaling,
    cos,
    sin,
    slots,
    rows,
    prefix,
    extra,
    num_extra,
    keys,
    values,
    threads,
):
    """The attention half of a layer for normed inputs h [m, H]; writes keys and values, returns [m, padded H]."""
    m, num_kv, head_dim = h.shape[0], keys.shape[2], keys.shape[4]
    num_out = -(-h.shape[1] // PAIR) * PAIR
    num_heads = matrices[layer, OUT, 3] // head_dim
    width = (num_heads + 2 * num_kv) * head_dim
    qkv = np.empty((m, -(-width // PAIR) * PAIR), np.float32)
    _product(matrices[layer, QKV], h, biases[0][layer], qkv, threads)
    heads = np.ascontiguousarray(qkv[:, :width]).reshape(m, num_heads + 2 * num_kv, head_dim)
    turned = num_heads + num_kv
    if head_norms.shape[0]:
        for t in range(m):
            rms_norm(heads[t, :num_heads], head_norms[layer, 0], eps, heads[t, :num_heads])
            rms_norm(heads[t, num_heads:turned], head_norms[layer, 1], eps, heads[t, num_heads:turned])
    rotate(heads[:, :turned], cos, sin)
    store(heads, num_heads, rows, slots, keys[layer], values[layer])
    mixed = np.empty((m, num_heads, head_dim), np.float32)
    attend(heads, num_heads, keys[layer], values[layer], rows, prefix, extra, num_extra, scaling, mixed)
    out = np.empty((m, num_out), np.float32)
    _product(matrices[layer, OUT], mixed.reshape(m, num_heads * head_dim), biases[1][layer], out, threads)
    return out


@njit(cache=True)
def run_layers(
    x, first_layer, last_layer, matrices, norms, biases, head_norms, eps, scaling,
    cos, sin, slots, rows, prefix, extra, num_extra, keys, values, threads,
):  # fmt: skip
    """Run the layers first_layer..last_layer over hidden states x [m, H], which become those after them.

    matrices: int64 [L, 4, 4], for QKV, OUT, GATE_UP and DOWN (format, address of weights, of scales, inputs). norms:
    [2 L + 1, H], the last one before the head. biases: four arrays [L, N], N = 0 where there is none. head_norms:
    [L, 2, d] or [0, 2, d]. cos, sin: [m, d]. slots, rows, prefix, extra, num_extra: where token t is written and what
    it sees (see attend). keys, values: the cache (see attention). threads: None or the number of threads.
    """
    m, hidden = x.shape
    h = np.empty_like(x)
    inner = matrices[0, DOWN, 3]
    gated, gate_up = np.empty((m, inner), np.float32), np.empty((m, 2 * inner), np.float32)
    down = np.empty((m, -(-hidden // PAIR) * PAIR), np.float32)
    for layer in range(first_layer, last_layer):
        rms_norm(x, norms[2 * layer], eps, h)
        add(x, _attention(
            h, layer, matrices, biases, head_norms, eps, scaling,
            cos, sin, slots, rows, prefix, extra, num_extra, keys, values, threads,
        ))  # fmt: skip
        rms_norm(x, norms[2 * layer + 1], eps, h)
        _product(matrices[layer, GATE_UP], h, biases[2][layer], gate_up, threads)
        gate(gate_up.reshape(m, 2, inner), gated)
        _product(matrices[layer, DOWN], gated, biases[3][layer], down, threads)
        add(x, down)


@njit(cache=True)
def read_out(x, wanted, norm, head, head_bias, eps, threads):
    """Logits [len(wanted), padded V] of some rows of the hidden states x [m, H] after the last layer.

    norm: [H]. head: (format, address of weights, of scales, outputs).
    """
    last = np.empty((wanted.shape[0], x.shape[1]), np.float32)
    for i in range(wanted.shape[0]):
        last[i] = x[wanted[i]]
    rms_norm(last, norm, eps, last)
    logits = np.empty((wanted.shape[0], -(-head[3] // PAIR) * PAIR), np.float32)
    _product(head, last, head_bias, logits, threads)
    return logits
