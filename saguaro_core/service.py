"""How many tokens a speculation should hold before it is served: none, those that are ready, or a few more.

The draft may be early (all K tokens ready), late (some ready), or empty-handed (a miss). One more token adds
the probability that it is accepted, with all before it, and costs one draft step while the target waits and one more
row of its verification. Rounds follow each other without end, so the best length is the one with the most tokens
beyond what the round's time is worth at the run's own rate (renewal-reward). What a length does to the hit rate of the
next round is left out: it moves the balance by a few per cent.

Lossless under rejection sampling, too: whether a position is drafted follows from times and counts of earlier rounds,
never from the token drawn there or after it. But then the sampled tokens depend on times, so a run with drawn tokens
is always served in full and stays reproducible by its seed. Under shared noise the tokens do not depend on lengths.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from saguaro_core.row_times import RowTimes

TokenSource = Literal["hit", "neural", "ngram", "pair"]

# Before so many rounds were timed nothing is cut short.
MIN_ROUNDS = 4
# What a round says fades, so that a source that was given up is tried again.
_MEMORY = 0.97
_PRIOR_ROUNDS = 6.0
_PRIOR_LOOKUP_ACCEPTANCE = 0.4


def best_length(
    ready: int,
    longest: int,
    *,
    acceptance: float,
    rate: float,
    step_seconds: float,
    verify_seconds: Callable[[int], float],
) -> tuple[int, float]:
    """The n in 0..longest that maximises 1 + a + ... + a^n tokens minus rate * (n - ready steps + 1 + n rows), and that
    maximum in tokens.
    """
    best, best_value, tokens = 0, float("-inf"), 0.0
    for n in range(longest + 1):
        tokens += acceptance**n
        value = tokens - rate * (step_seconds * max(0, n - ready) + verify_seconds(1 + n))
        if value > best_value:
            best, best_value = n, value
    return best, best_value


@dataclass(slots=True)
class _Tally:
    """Accepted and rejected tokens of one source, fading round by round."""

    accepted: float = 0.0
    rejected: float = 0.0

    def add(self, drafted: int, accepted: int) -> None:
        self.accepted += accepted
        self.rejected += accepted < drafted

    def fade(self) -> None:
        self.accepted *= _MEMORY
        self.rejected *= _MEMORY

    def mean(self, prior: float) -> float:
        weight = self.accepted + self.rejected + _PRIOR_ROUNDS
        return (self.accepted + _PRIOR_ROUNDS * prior) / weight


@dataclass(slots=True)
class RunTimes:
    """What this run has measured: verifications by rows, draft steps, acceptance by source, tokens per second.

    Of `batch_size` sequences decoded together all wait for a longer verification, and for every step of the draft;
    `waiting` is how many of them wait for each one that a step helps, as those that need steps make them together.
    """

    batch_size: int = 1
    waiting: float = 1.0
    verify: RowTimes = field(default_factory=lambda: RowTimes(prior_slope=0.04))
    branch_pass: RowTimes = field(default_factory=lambda: RowTimes(prior_slope=0.05))
    num_steps: int = 0
    step_seconds: float = 0.0
    num_rounds: int = 0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _tallies: dict[TokenSource, _Tally] = field(
        default_factory=lambda: {"hit": _Tally(), "neural": _Tally(), "ngram": _Tally(), "pair": _Tally()}
    )

    @property
    def rate(self) -> float | None:
        """Tokens per second of the latest rounds; None while too little was measured to decide by it."""
        if self.num_rounds < MIN_ROUNDS or self.verify.count < MIN_ROUNDS or self._seconds <= 0.0:
            return None
        return self._tokens / self._seconds

    def acceptance(self, source: TokenSource) -> float:
        """Probability that a token of this source is accepted. The draft's own tokens help each other out."""
        tally = self._tallies[source]
        if source in ("ngram", "pair"):
            return tally.mean(_PRIOR_LOOKUP_ACCEPTANCE)
        hit, neural = self._tallies["hit"], self._tallies["neural"]
        pooled = _Tally(hit.accepted + neural.accepted, hit.rejected + neural.rejected).mean(0.6)
        return tally.mean(pooled)

    def observe_step(self, seconds: float) -> None:
        """One draft token was made just in time."""
        self.num_steps += 1
        self.step_seconds += (seconds - self.step_seconds) / min(self.num_steps, 32)

    def observe_round(
        self, source: TokenSource | None, drafted: int, accepted: int, verify_seconds: float, seconds: float
    ) -> None:
        """A round that verified `drafted` tokens ended `seconds` after the one before it; verify_seconds 0: unknown."""
        self.num_rounds += 1
        self._tokens = self._tokens * _MEMORY + accepted + 1
        self._seconds = self._seconds * _MEMORY + seconds
        for tally in self._tallies.values():
            tally.fade()
        if source is not None:
            self._tallies[source].add(drafted, accepted)
        if verify_seconds > 0.0:
            self.verify.add(1 + drafted, verify_seconds)

    def length(self, source: TokenSource, ready: int, longest: int) -> int | None:
        """The best length of a speculation of which `ready` tokens are there; None while that cannot be said."""
        best = self._best(source, ready, longest)
        return None if best is None else best[0]

    def prefers_lookup(self, source: TokenSource, found: int, longest: int) -> bool:
        """Whether `found` tokens that lookup offers now are worth more than drafting up to `longest` first."""
        lookup, neural = self._best(source, found, found), self._best("neural", 0, longest)
        return lookup is not None and neural is not None and lookup[1] > neural[1]

    def _best(self, source: TokenSource, ready: int, longest: int) -> tuple[int, float] | None:
        rate = self.rate
        if rate is None or (self.num_steps == 0 and ready < longest):
            return None
        return best_length(
            ready,
            longest,
            acceptance=self.acceptance(source),
            rate=rate,
            step_seconds=self.step_seconds * self.waiting,
            verify_seconds=lambda rows: self.batch_size * self.verify.seconds(rows),
        )
