"""The steps of a decoder layer that are no products, compiled. A row's result never depends on other rows."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LOWEST = np.float32(-87.0)


@intrinsic
def _float_of_bits(context: Any, bits: Any) -> Any:
    """The float32 with these bits, in a form that LLVM turns into vector code."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), write


@njit(cache=True, fastmath=True, inline="always")
def exp_of_negative(x):
    """exp of a float32 of at most 0, within 2 units in the last place (Cephes' polynomial); vectors of it compile."""
    x = max(x, _LOWEST)
    whole = np.int32(x * _LOG2_E - np.float32(0.5))  # The nearest whole number, because the cast drops the fraction.
    n = np.float32(whole)
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * _float_of_bits((whole + np.int32(127)) << np.int32(23))  # type: ignore[call-arg]


@njit(cache=True, fastmath=True)
def rms_norm(x, weight, eps, out):
    """out = weight * x / rms(x) for each row of x [m, H]; out may be x."""
    size = x.shape[1]
    for row in range(x.shape[0]):
        total = np.float32(0.0)
        for i in range(size):
            total += x[row, i] * x[row, i]
        factor = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
        for i in range(size):
            out[row, i] = x[row, i] * factor * weight[i]


@njit(cache=True, fastmath=True, error_model="numpy")  # A check for division by 0 would keep vectors away.
def _gate_row(gate_row, up_row, out):
    for i in range(out.shape[0]):
        g = gate_row[i]
        e = exp_of_negative(-abs(g))
        share = np.float32(1.0) / (np.float32(1.0) + e)
        out[i] = g * up_row[i] * (share if g > np.float32(0.0) else e * share)


@njit(cache=True)
def gate(gate_up, out):
    """out [m, I] = silu(gate) * up, where gate_up [m, 2, I] holds both."""
    for row in range(out.shape[0]):
        _gate_row(gate_up[row, 0], gate_up[row, 1], out[row])


@njit(cache=True, fastmath=True)
def rotate(heads, cos, sin):
    """Rotary embedding of heads [m, h, d] in place, halves paired as in Llama; cos and sin are [m, d]."""
    half = heads.shape[2] // 2
    for row in range(heads.shape[0]):
        for head in range(heads.shape[1]):
            for i in range(half):
                a, b = heads[row, head, i], heads[row, head, half + i]
                heads[row, head, i] = a * cos[row, i] - b * sin[row, i]
                heads[row, head, half + i] = b * cos[row, half + i] + a * sin[row, half + i]


@njit(cache=True, fastmath=True)
def add(x, y):
    """x += y, both [m, n]; y may have more columns."""
    for row in range(x.shape[0]):
        for i in range(x.shape[1]):
            x[row, i] += y[row, i]


@njit(cache=True, fastmath=True)
def softmax(scores, count):
    """Softmax of the first `count` scores in place."""
    highest = scores[0]
    for i in range(count):
        highest = max(highest, scores[i])
    for i in range(count):
        scores[i] = exp_of_negative(scores[i] - highest)
    total = np.float32(0.0)
    for i in range(count):
        total += scores[i]
    factor = np.float32(1.0) / total
    for i in range(count):
        scores[i] *= factor
