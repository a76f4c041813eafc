"""How many tokens a speculation should hold before it is served: none, those that are ready, or a few more.

The draft may be early (all K tokens ready), late (some ready), or empty-handed (a miss). One more token adds
the probability that it is accepted, with all before it, and costs one draft step while the target waits and one more
row of its verification. Rounds follow each other without end, so the best length is the one with the most tokens
beyond what the round's time is worth at the run's own rate (renewal-reward). What a length does to the hit rate of the
next round is left out: it moves the balance by a few per cent.

Under shared noise and at temperature 0 the tokens that are said do not depend on lengths, so these may follow from
anything, the draft's confidence in each token included. Where tokens are drawn from the draft they would depend on
times: such a run is always served in full, and stays reproducible by its seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from saguaro_core.row_times import RowTimes

TokenSource = Literal["hit", "neural", "ngram", "pair"]
NextToken = Literal["drafted", "guess", "nothing"]

# Before so many rounds were timed nothing is cut short.
MIN_ROUNDS = 4
# What a round says fades, so that a source that was given up is tried again.
_MEMORY = 0.97
_PRIOR_ROUNDS = 6.0
_PRIOR_LOOKUP_ACCEPTANCE = 0.4


def best_length(acceptances: Sequence[float], cost: float) -> int:
    """The n that maximises a_1 + a_1 a_2 + ... (n terms) - n * cost, in tokens. acceptances[i]: that token i + 1 is
    accepted if those before it are.
    """
    reached = 1.0
    for n, acceptance in enumerate(acceptances):
        reached *= acceptance  # It only falls: the first token that is not worth its row ends the search.
        if reached <= cost:
            return n
    return len(acceptances)


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
        self,
        source: TokenSource | None,
        drafted: int,
        accepted: int,
        verify_seconds: float,
        seconds: float,
        num_own: int = 0,
    ) -> None:
        """A round that verified `drafted` tokens ended `seconds` after the one before it; verify_seconds 0: unknown.

        num_own: how many of them, the first ones, were the draft's own; 0: all are of `source`.
        """
        self.num_rounds += 1
        self._tokens = self._tokens * _MEMORY + accepted + 1
        self._seconds = self._seconds * _MEMORY + seconds
        for tally in self._tallies.values():
            tally.fade()
        if source is not None:
            num_own = num_own or drafted
            self._tallies[source].add(num_own, min(accepted, num_own))
        if verify_seconds > 0.0:
            self.verify.add(1 + drafted, verify_seconds)

    @property
    def row_seconds(self) -> float:
        """What one more row of the verification costs all who wait for it."""
        return self.batch_size * self.verify.per_row

    def length(self, acceptances: Sequence[float]) -> int | None:
        """How many of the tokens that are ready to serve, by the acceptance of each; None while that cannot be said."""
        rate = self.rate
        return None if rate is None else best_length(acceptances, rate * self.row_seconds)

    def next_token(self, source: TokenSource | None, reached: float, share: float) -> NextToken | None:
        """What should come after tokens that all stand with probability `reached`: a guess that is right with
        probability `share`, one more token of the draft, as `source` (None: that cannot be), or nothing; None while
        it cannot be said.
        """
        rate = self.rate
        if rate is None or self.num_steps == 0:
            return None
        guess = reached * share - rate * self.row_seconds
        # While it drafts for the target the draft builds no cache: its time is lost like the target's.
        step = 2.0 * self.step_seconds * self.waiting
        drafted = 0.0
        if source is not None:
            drafted = reached * self.acceptance(source) - rate * (step + self.row_seconds)
        if max(guess, drafted) <= 0.0:
            return "nothing"
        return "guess" if guess >= drafted else "drafted"
