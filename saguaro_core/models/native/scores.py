"""What is read off rows of scores on the CPU, compiled: their sums, the probabilities of some, the largest few.

The rows are long and the steps small, so that torch would spend most of the time on starting its many operations.
"""

import numpy as np
from numba import njit

from saguaro_core.models.native.steps import exp_of_negative

_CHUNK = 64


# Scores may be -inf, never NaN: a runner raises before.
_FAST = {"reassoc", "contract", "arcp", "nnan", "nsz"}


@njit(cache=True, fastmath=_FAST)
def _highest(chunk):
    highest = chunk[0]
    for i in range(chunk.shape[0]):
        highest = max(highest, chunk[i])
    return highest


@njit(cache=True, fastmath=_FAST, error_model="numpy")
def _log_total(row, scale):
    """log of the sum of exp(scale * row)."""
    highest = _highest(row)
    total = np.float32(0.0)
    for i in range(row.shape[0]):
        total += exp_of_negative((row[i] - highest) * scale)
    return np.log(total) + highest * scale


@njit(cache=True)
def find_log_totals(scores, scale, found):
    """log of the sum of exp(scale * row) for each row of scores [m, n], in found [m]."""
    for row in range(scores.shape[0]):
        found[row] = _log_total(scores[row], scale)


@njit(cache=True)
def lift(scores, rows, columns, log_odds, scale):
    """Raise scores[rows[i], columns[i]] so that softmax(scale * scores) becomes (1 - w) of itself and w on that column,
    log_odds being log(w / (1 - w)).
    """
    for i in range(rows.shape[0]):
        row = scores[rows[i]]
        own, copied = row[columns[i]] * scale, _log_total(row, scale) + log_odds[i]
        highest = max(own, copied)
        row[columns[i]] = (highest + np.log1p(np.exp(min(own, copied) - highest))) / scale


@njit(cache=True)
def _insert(values, indices, value, index):
    """Put a value into a falling list, whose last one leaves."""
    place = values.shape[0] - 1
    while place > 0 and values[place - 1] < value:
        values[place], indices[place] = values[place - 1], indices[place - 1]
        place -= 1
    values[place], indices[place] = value, index


@njit(cache=True)
def find_largest(scores, values, indices):
    """The largest scores of each row [m, n], falling, the first of equal ones before: values and indices [m, count]."""
    for row in range(scores.shape[0]):
        values[row] = -np.inf
        for start in range(0, scores.shape[1], _CHUNK):
            chunk = scores[row, start : start + _CHUNK]
            if _highest(chunk) > values[row, -1]:
                for i in range(chunk.shape[0]):
                    if chunk[i] > values[row, -1]:
                        _insert(values[row], indices[row], chunk[i], start + i)
