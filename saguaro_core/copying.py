"""Copying: the draft's distribution, mixed with a point mass on what followed the same words before.

A small draft knows the language and little of this text; the text so far knows what comes after words that it has seen
already. Where the last n tokens came before, the draft's q becomes (1 - w) q + w on the token that followed them, with
w from how often such copies of n-grams were right in this answer. The result is the draft's distribution in every
respect: tokens are drawn from it, and verification divides by it, so no rule's exactness depends on w.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from saguaro_core.ngrams import MAX_NGRAM, NgramIndex
from saguaro_core.scores import with_point_masses

# How often a copy is right, by the length n of the match, before this answer has said anything; and how many
# observations that is worth. Where a copy is wrong the draft may still be right, so w stays below the share.
_PRIOR_SHARES = (0.2, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8)
_PRIOR_WEIGHT = 8.0
_TRUST = 0.8


class CopyGuide:
    """Mixes copies into the draft's logits for one request; `ngrams` is the text so far, which others extend.

    column_of: the column of each target id in the draft's head; what the head lacks cannot be copied. temperature:
    the run's, 1 for a greedy run.
    """

    def __init__(self, ngrams: NgramIndex, column_of: Mapping[int, int], temperature: float) -> None:
        self._ngrams, self._column_of, self._temperature = ngrams, column_of, temperature
        self._right, self._seen = [0.0] * MAX_NGRAM, [0.0] * MAX_NGRAM

    def observe(self, committed: Sequence[int]) -> None:
        """Count which copies would have been right; call it before the tokens are appended to the text."""
        tail = self._ngrams.token_ids[-MAX_NGRAM:]
        for token in committed:
            n, place = self._ngrams.find(tail)
            if n:
                self._seen[n - 1] += 1
                self._right[n - 1] += self._ngrams.token_ids[place] == token
            tail = [*tail, token][-MAX_NGRAM:]

    def share(self, n: int) -> float:
        """How often a copy after a match of n tokens is right, in (0, 1)."""
        prior = _PRIOR_WEIGHT * _PRIOR_SHARES[n - 1]
        return (self._right[n - 1] + prior) / (self._seen[n - 1] + _PRIOR_WEIGHT)

    def weight(self, n: int) -> float:
        """w of a match of n tokens, in (0, 1)."""
        return _TRUST * self.share(n)

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
                weights.append(self.weight(n))
        return with_point_masses(logits, rows, columns, weights, self._temperature) if rows else logits
