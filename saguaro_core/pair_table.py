"""Which token most often followed each token in the target's own answers.

A deterministic guess, verified as a point mass. It lives as long as the draft process and is bounded: the tokens
seen least recently go first, and each keeps its few most frequent followers.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_TOKENS = 32_768
MAX_FOLLOWERS = 8
MAX_PROMPTS = 65_536
MAX_OPEN = 64
MIN_COUNT = 2
# A proposal goes on while it is this likely to be right to its end: a verified row costs a few per cent of a round.
MIN_SURVIVAL = 0.3


@dataclass(slots=True)
class _Followers:
    """Counts of what followed one token; `total` includes what was dropped."""

    counts: dict[int, int] = field(default_factory=dict)
    total: int = 0

    def add(self, token: int) -> None:
        self.total += 1
        if token not in self.counts and len(self.counts) >= MAX_FOLLOWERS:
            del self.counts[min(self.counts, key=self.counts.__getitem__)]
        # Counted anew at the end, so that of equals the one seen last is found first.
        self.counts[token] = self.counts.pop(token, 0) + 1

    def best(self) -> tuple[int, float] | None:
        """The most frequent follower and its share, a little below the observed one; None if it was seen once only."""
        token = max(reversed(self.counts), key=self.counts.__getitem__)
        count = self.counts[token]
        return None if count < MIN_COUNT else (token, count / (self.total + 1))


class PairTable:
    """Counts pairs of neighbouring tokens; len() is the number of first tokens that it knows."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._followers: OrderedDict[int, _Followers] = OrderedDict()

    def __len__(self) -> int:
        return len(self._followers)

    def learn(self, before: int, token_ids: Sequence[int]) -> None:
        """Count committed tokens, the first of which followed `before`."""
        for token in token_ids:
            followers = self._followers.setdefault(before, _Followers())
            followers.add(token)
            self._followers.move_to_end(before)
            before = token
        while len(self._followers) > self._max_tokens:
            self._followers.popitem(last=False)

    def guess(self, last: int) -> tuple[int, float] | None:
        """What most often followed `last`, and how likely that is; None if it is not known well enough."""
        followers = self._followers.get(last)
        return None if followers is None else followers.best()

    def propose(self, last: int, count: int) -> list[int]:
        """Up to `count` tokens that should follow `last`, each the most frequent one after the one before it."""
        proposal: list[int] = []
        survival = 1.0
        while len(proposal) < count:
            best = self.guess(last)
            if best is None or survival * best[1] < MIN_SURVIVAL:
                break
            last, survival = best[0], survival * best[1]
            proposal.append(last)
        return proposal


class Notes:
    """Committed tokens to learn from later."""

    def __init__(self) -> None:
        self._learnt: list[tuple[int, tuple[int, ...]]] = []

    def __bool__(self) -> bool:
        return bool(self._learnt)

    def learn(self, before: int, token_ids: Sequence[int]) -> None:
        """Note tokens, the first of which followed `before`."""
        self._learnt.append((before, tuple(token_ids)))

    def teach(self, table: PairTable) -> None:
        """Count everything that was noted."""
        for before, token_ids in self._learnt:
            table.learn(before, token_ids)


class PairMemory:
    """The pair table that outlives requests, without what would let an answer be guessed from itself.

    The same prompt usually has the same answer: the lanes of a comparison, a benchmark that repeats itself. What one
    run said is therefore learnt when another prompt comes, and a prompt that comes again is answered without it.
    """

    def __init__(self) -> None:
        self.table = PairTable()
        self._open: OrderedDict[tuple[int, ...], Notes] = OrderedDict()
        self._known: OrderedDict[int, None] = OrderedDict()

    def is_known(self, prompt: Sequence[int]) -> bool:
        """Whether the table holds what an answer to this very prompt said."""
        return hash(tuple(prompt)) in self._known

    def notes(self, prompt: Sequence[int]) -> Notes:
        """Where the answer to `prompt` is noted; what was answered to other prompts is learnt now.

        A prompt without an answer yet, as others of the same batch are, stays open.
        """
        key = tuple(prompt)
        for other in [other for other, notes in self._open.items() if other != key and notes]:
            self._open.pop(other).teach(self.table)
            self._known[hash(other)] = None
        self._open[key] = Notes()
        for memory, most in ((self._open, MAX_OPEN), (self._known, MAX_PROMPTS)):
            while len(memory) > most:
                memory.popitem(last=False)
        return self._open[key]
