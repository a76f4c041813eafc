"""Copying: the draft's distribution, mixed with a point mass on what followed the same words before.

A small draft knows the language and little of this text; the text so far knows what comes after words that it has seen
already. Where the last n tokens came before, the draft's q becomes (1 - w) q + w on the token that followed them. The
result is the draft's distribution in every respect: tokens are drawn from it, and verification divides by it, so no
rule's exactness depends on w.

w is learnt, for each n, as the weight of a mixture is (expectation maximisation, one step for each verdict): a token
counts for the copy by the share of its probability that came from it. A draft that needs no copies soon gets none.
"""

from collections.abc import Mapping, Sequence
from typing import Self

from torch import Tensor

from saguaro_core.ngrams import MAX_NGRAM, NgramIndex
from saguaro_core.scores import with_point_masses

# How often a copy is right, by the length n of the match, before an answer has said anything; and how many
# observations that is worth.
_PRIOR_SHARES = (0.2, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8)
_PRIOR_WEIGHT = 8.0
assert len(_PRIOR_SHARES) == MAX_NGRAM
# Where a copy is right the draft often knows the token, too: weights begin below the shares.
_FIRST_WEIGHTS = tuple(0.6 * share for share in _PRIOR_SHARES)
_FIRST_WEIGHT = 4.0
_LONGEST_MEMORY = 400.0


class CopyWeights:
    """w by the length of the match, for one draft; what is long ago fades."""

    def __init__(self) -> None:
        self._copied, self._seen = [0.0] * MAX_NGRAM, [0.0] * MAX_NGRAM

    def weight(self, n: int) -> float:
        """w of a match of n tokens, in (0, 1)."""
        first = _FIRST_WEIGHT * _FIRST_WEIGHTS[n - 1]
        return (self._copied[n - 1] + first) / (self._seen[n - 1] + _FIRST_WEIGHT)

    def copy(self) -> Self:
        """The same weights, to be taught on their own."""
        other = type(self)()
        other._copied, other._seen = list(self._copied), list(self._seen)
        return other

    def observe(self, n: int, responsibility: float) -> None:
        """Count a verdict on a mixture: the probability that its token came from the copy."""
        if self._seen[n - 1] >= _LONGEST_MEMORY:
            self._copied[n - 1] *= 0.5
            self._seen[n - 1] *= 0.5
        self._seen[n - 1] += 1
        self._copied[n - 1] += responsibility


class CopyGuide:
    """Mixes copies into the draft's logits for one request; `ngrams` is the text so far, which others extend.

    column_of: the column of each target id in the draft's head; what the head lacks cannot be mixed in. temperature:
    the run's, 1 for a greedy run. weights: what earlier answers taught; they go on learning here.
    """

    def __init__(
        self, ngrams: NgramIndex, column_of: Mapping[int, int], temperature: float, weights: CopyWeights
    ) -> None:
        self._ngrams, self._column_of, self._temperature = ngrams, column_of, temperature
        self._weights = weights
        self._right, self._seen = [0.0] * MAX_NGRAM, [0.0] * MAX_NGRAM

    def observe(self, committed: Sequence[int], q: Sequence[float]) -> None:
        """Count which copies were right; call it before the tokens are appended to the text.

        q: of the tokens that the draft itself proposed, each in the place of a committed one, as they were mixed; the
        last committed token is the target's own.
        """
        tail = self._ngrams.token_ids[-MAX_NGRAM:]
        for place, token in enumerate(committed):
            n, at = self._ngrams.find(tail)
            if n:
                copied = self._ngrams.token_ids[at]
                self._seen[n - 1] += 1
                self._right[n - 1] += copied == token
                if place < len(q) and copied in self._column_of:
                    # Of a token that was not proposed q is not known: it was less, and counts as nothing.
                    own = q[place] if place < len(committed) - 1 else 0.0
                    mixed = max(own, self._weights.weight(n))
                    self._weights.observe(n, self._weights.weight(n) / mixed if copied == token else 0.0)
            tail = [*tail, token][-MAX_NGRAM:]

    def share(self, n: int) -> float:
        """How often a copy after a match of n tokens is right in this answer, in (0, 1)."""
        prior = _PRIOR_WEIGHT * _PRIOR_SHARES[n - 1]
        return (self._right[n - 1] + prior) / (self._seen[n - 1] + _PRIOR_WEIGHT)

    def guess(self, tail: Sequence[int]) -> tuple[int, float] | None:
        """The token that followed the longest match of `tail`, and how often such a guess is right."""
        n, place = self._ngrams.find(tail)
        return (self._ngrams.token_ids[place], self.share(n)) if n else None

    def mix(self, logits: Tensor, tails: Sequence[Sequence[int]]) -> Tensor:
        """Logits [m, n] with the copies in them; `tails` are the last tokens (8 or more, if there are) before each.

        Only the copied token's logit changes, in `logits` itself where that is possible.
        """
        rows, columns, weights = [], [], []
        for row, tail in enumerate(tails):
            n, place = self._ngrams.find(tail)
            column = self._column_of.get(self._ngrams.token_ids[place]) if n else None
            if column is not None:
                rows.append(row)
                columns.append(column)
                weights.append(self._weights.weight(n))
        return with_point_masses(logits, rows, columns, weights, self._temperature) if rows else logits
