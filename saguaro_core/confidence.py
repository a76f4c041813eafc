"""What the draft's own probability of a drafted token says about its acceptance.

A good draft's q is nearly the acceptance itself; how far off it is, is learnt for five ranges of q from the run's own
verdicts. It decides how many tokens are served and which outcomes are prepared, never what is said.
"""

from collections.abc import Sequence

_NUM_RANGES = 5
_PRIOR_WEIGHT = 8.0
# What was seen fades with each verdict, so that a range of q that is no longer served is tried again.
_MEMORY = 0.995
_LEAST, _MOST = 0.02, 0.98


class Confidence:
    """Turns q of a drafted token into the probability that it is accepted, given that those before it are."""

    def __init__(self) -> None:
        self._surplus, self._seen = [0.0] * _NUM_RANGES, [0.0] * _NUM_RANGES

    def acceptance(self, q: float) -> float:
        """Probability of acceptance, kept off 0 and 1."""
        index = _range(q)
        bias = self._surplus[index] / (self._seen[index] + _PRIOR_WEIGHT)
        return min(_MOST, max(_LEAST, q + bias))

    def observe(self, q: Sequence[float], accepted: int) -> None:
        """Count a verdict on drafted tokens: the first `accepted` stand, one after them did not."""
        self._surplus = [_MEMORY * surplus for surplus in self._surplus]
        self._seen = [_MEMORY * seen for seen in self._seen]
        for place, value in enumerate(q[: accepted + 1]):
            index = _range(value)
            self._seen[index] += 1
            self._surplus[index] += (place < accepted) - value


def _range(q: float) -> int:
    return min(_NUM_RANGES - 1, int(q * _NUM_RANGES))
