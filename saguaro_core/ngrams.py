"""Where each n-gram of a growing text was last followed by something: the memory behind lookup and copying."""

from collections.abc import Sequence

MAX_NGRAM = 8


class NgramIndex:
    """Where each n-gram (n = 1..8) of a growing token sequence was last followed by something."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self.token_ids: list[int] = []
        self._followed_at: dict[tuple[int, ...], int] = {}
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens; the n-grams that they follow become findable."""
        for token in token_ids:
            place = len(self.token_ids)
            for n in range(1, min(MAX_NGRAM, place) + 1):
                self._followed_at[tuple(self.token_ids[place - n : place])] = place
            self.token_ids.append(token)

    def find(self, tail: Sequence[int]) -> tuple[int, int]:
        """The longest n-gram that ends `tail` and was followed by something: n, and the place of what followed it
        last. n is 0 where not even the last token is known.

        A match of n tokens contains one of n - 1, so the search stops at the first length without one.
        """
        n, place = 0, 0
        while n < min(MAX_NGRAM, len(tail)):
            longer = self._followed_at.get(tuple(tail[len(tail) - n - 1 :]))
            if longer is None:
                break
            n, place = n + 1, longer
        return n, place

    def propose(self, count: int) -> list[int]:
        """Up to `count` tokens that followed the latest match of the longest n-gram at the end, n >= 2; else none.

        A single repeated token is too weak a sign to spend verification rows on.
        """
        n, place = self.find(self.token_ids[-MAX_NGRAM:])
        return self._continuation(place, count) if n >= 2 else []

    def _continuation(self, place: int, count: int) -> list[int]:
        """Tokens from `place` on; past the end the proposal continues with itself (a loop keeps looping)."""
        proposal: list[int] = []
        for index in range(place, place + count):
            past_end = index - len(self.token_ids)
            proposal.append(self.token_ids[index] if past_end < 0 else proposal[past_end])
        return proposal
