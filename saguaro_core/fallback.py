"""What speculates after a miss: the draft itself, or, fast, lookup: of the last n-gram in the text so far, else of the
last token in a table of pairs, else nothing (a plain step).

What lookup finds is a guess without probabilities, so it is verified as a point mass (q = 1 on each proposed token).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from saguaro_core.config import FallbackPolicy
from saguaro_core.ngrams import NgramIndex
from saguaro_core.pair_table import PairMemory, PairTable
from saguaro_core.theory import Backup, critical_batch_size, ssd_speed

ChosenBackup = Literal["neural", "fast"]
LookupKind = Literal["ngram", "pair", "none"]


class FastBackup:
    """The fast backup of one request, in its order: n-grams of the prompt and the answer, pairs of the answer, pairs of
    earlier answers to other prompts (left out when drawn tokens must not depend on them).
    """

    def __init__(self, prompt: Sequence[int], memory: PairMemory, *, alone: bool = False) -> None:
        self.ngrams = NgramIndex(prompt)
        own = PairTable()
        self._tables = [own] if alone or memory.is_known(prompt) else [own, memory.table]
        self._learners = (own, memory.notes(prompt))

    def extend(self, committed: Sequence[int]) -> None:
        """Learn from tokens that the target committed."""
        if self.ngrams.token_ids:
            for learner in self._learners:
                learner.learn(self.ngrams.token_ids[-1], committed)
        self.ngrams.extend(committed)

    def guess_pair(self, last: int) -> tuple[int, float] | None:
        """What should follow `last` by the first table that knows, and how likely that is."""
        return next(filter(None, (table.guess(last) for table in self._tables)), None)

    def propose(self, count: int) -> tuple[LookupKind, list[int]]:
        """Up to `count` tokens that should come next, and where they were found."""
        if token_ids := self.ngrams.propose(count):
            return "ngram", token_ids
        for table in self._tables if self.ngrams.token_ids else ():
            if token_ids := table.propose(self.ngrams.token_ids[-1], count):
                return "pair", token_ids
        return "none", []


@dataclass(slots=True)
class _Mean:
    """A running mean that starts from a prior worth `weight` observations."""

    total: float
    weight: float

    @classmethod
    def prior(cls, value: float, weight: float = 4.0) -> "_Mean":
        return cls(value * weight, weight)

    def add(self, value: float) -> None:
        self.total += value
        self.weight += 1

    @property
    def value(self) -> float:
        return self.total / self.weight


@dataclass(slots=True)
class FallbackChooser:
    """Follows the request's policy; `auto` takes the backup that Theorem 17's speed favours for `batch_size`
    sequences that wait for each other, from this run's own times.

    Tokens per round after a hit, after a neural and after a fast fallback, and the hit rate start from priors worth
    four rounds. A round counts for the backup that was chosen, whatever that had to offer.
    """

    policy: FallbackPolicy
    batch_size: int = 1
    last: ChosenBackup | None = "neural"
    hit_rate: _Mean = field(default_factory=lambda: _Mean.prior(0.5))
    tokens_hit: _Mean = field(default_factory=lambda: _Mean.prior(2.0))
    tokens_neural: _Mean = field(default_factory=lambda: _Mean.prior(1.8))
    tokens_fast: _Mean = field(default_factory=lambda: _Mean.prior(1.2))
    verify_seconds: _Mean = field(default_factory=lambda: _Mean(0.0, 1e-9))
    neural_seconds: _Mean = field(default_factory=lambda: _Mean(0.0, 1e-9))

    def choose(self) -> ChosenBackup:
        """The backup for the next miss."""
        if self.policy != "auto":
            return self.policy
        backups = self._backups()
        if backups is None:
            return "neural"
        neural, fast = (
            ssd_speed(self.hit_rate.value, self.tokens_hit.value, backup, build_time=1.0, batch_size=self.batch_size)
            for backup in backups
        )
        return "fast" if fast > neural else "neural"

    def critical_batch_size(self) -> int | None:
        """b* of Theorem 17 by this run's own measurements; None if the fast backup never wins or times are missing."""
        backups = self._backups()
        if backups is None:
            return None
        neural, fast = backups
        return critical_batch_size(self.hit_rate.value, self.tokens_hit.value, neural, fast, build_time=1.0)

    def _backups(self) -> tuple[Backup, Backup] | None:
        """The neural and the fast backup as measured; None while a time is unknown."""
        if self.verify_seconds.weight < 1 or self.neural_seconds.weight < 1:
            return None
        duration = self.neural_seconds.value / self.verify_seconds.value
        return Backup(tokens_per_round=self.tokens_neural.value, time=duration), Backup(
            tokens_per_round=self.tokens_fast.value, time=0.0
        )

    def observe_round(self, is_hit: bool | None, accepted: int, seconds: float) -> None:
        """A round of `accepted` + 1 tokens ended `seconds` after it was served; None: it had no cache yet."""
        if is_hit is not None:
            self.hit_rate.add(float(is_hit))
        self.verify_seconds.add(seconds)
        if is_hit:
            self.tokens_hit.add(accepted + 1)
        elif self.last is not None:
            (self.tokens_neural if self.last == "neural" else self.tokens_fast).add(accepted + 1)

    def observe_fallback(self, backup: ChosenBackup | None, seconds: float) -> None:
        """A miss was answered by `backup` in `seconds`; None: by something that says nothing about either."""
        self.last = backup
        if backup == "neural":
            self.neural_seconds.add(seconds)
