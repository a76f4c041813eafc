"""What the draft holds between two outcomes: the speculation under verification, and the branches grown meanwhile.

Trunk tokens live in cache slots equal to their positions. The rows of each pass take the consecutive slots after those
in use, until a hit moves a branch's own into the trunk. A pass may take branches of different lengths.
"""

from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from torch import Tensor

from saguaro_core.draft.proposer import Draws, Place, Proposer
from saguaro_core.events import Served
from saguaro_core.fan_out import CacheState
from saguaro_core.models.runner import ForwardBatch
from saguaro_core.service import TokenSource
from saguaro_core.speculation_cache import SpeculationCache
from saguaro_core.verification import Outcome

# Draft streams of one round: fallback forward d uses lane d, depth d of the branches uses lane _BRANCH_LANES + d.
_BRANCH_LANES = 1024


@dataclass(slots=True)
class Drafted:
    """The speculation under verification. `rank_scores` [n] are known for its first positions.

    q: the draft's probability of its first tokens, which are the draft's own. guessed: for each token after them, which
    the text alone suggested, the probability that it is right.
    """

    token_ids: list[int] = field(default_factory=list)
    q: list[float] = field(default_factory=list)
    guessed: list[float] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)
    rank_scores: list[Tensor] = field(default_factory=list)
    state: CacheState = "miss"
    source: TokenSource | None = None

    def add(self, proposer: Proposer, draws: Draws, row: int) -> None:
        """Append the token that `draws` chose in one of its rows."""
        column = draws.columns[row]
        self.token_ids.append(proposer.target_ids[column])
        self.q.append(draws.probabilities[row])
        self.rank_scores.append(draws.rank_scores[row])
        if draws.q is not None:
            self.distributions.append(draws.q[row])

    def guess(self, token_id: int, share: float) -> None:
        """Append a token that is right with probability `share`. None of the draft's own can follow."""
        self.token_ids.append(token_id)
        self.guessed.append(share)

    def distribution_bytes(self) -> bytes:
        """Distributions [len(token_ids), n] as they travel: float32, row-major; empty for a deterministic choice."""
        if not self.distributions:
            return b""
        return torch.stack(self.distributions).cpu().float().numpy().tobytes()

    def served(self, most: int, eos: set[int]) -> Served:
        """How much of what might be served this is: a token that ends the turn has nothing after it."""
        if not self.token_ids:
            return "plain"
        return "short" if len(self.token_ids) < most and self.token_ids[-1] not in eos else "full"


@dataclass(slots=True)
class Branches:
    """The cache under construction: an outcome for each branch, and what each has drawn so far.

    chances: probability of each outcome. first_positions: the position of each branch's first token. slots[b]: where
    the tokens that branch b was fed lie, its bonus token first. drawn[b]: what its rows drew, as (draws, row).
    """

    cache: SpeculationCache = field(default_factory=SpeculationCache)
    fan_out: tuple[int, ...] = ()
    chances: list[float] = field(default_factory=list)
    round_index: int = 0
    next_fan_out: tuple[int, ...] = ()
    trunk_length: int = 0
    longest: int = 0
    first_positions: list[int] = field(default_factory=list)
    slots: list[list[int]] = field(default_factory=list)
    drawn: list[list[tuple[Draws, int]]] = field(default_factory=list)
    used: int = 0

    @classmethod
    def plant(
        cls,
        ranked: list[tuple[Outcome, float]],
        fan_out: tuple[int, ...],
        *,
        num_context: int,
        trunk_length: int,
        longest: int,
        round_index: int,
        next_fan_out: tuple[int, ...],
    ) -> Self:
        """Branches for outcomes, each with its probability, of the speculation that fills the trunk from `num_context`
        to `trunk_length`. None grows beyond `longest` tokens. `next_fan_out` is the cache's shape after a hit.
        """
        outcomes = [outcome for outcome, _ in ranked]
        return cls(
            cache=SpeculationCache(outcomes, [0] * len(outcomes)),
            fan_out=fan_out,
            chances=[chance for _, chance in ranked],
            round_index=round_index,
            next_fan_out=next_fan_out,
            trunk_length=trunk_length,
            longest=longest,
            first_positions=[num_context + outcome.accepted for outcome in outcomes],
            slots=[[] for _ in outcomes],
            drawn=[[] for _ in outcomes],
            used=trunk_length,
        )

    def unfinished(self) -> list[int]:
        """The branches that may still grow."""
        return [branch for branch, length in enumerate(self.cache.lengths) if length < self.longest]

    def q_of(self, branch: int) -> list[float]:
        """The draft's probability of each token that the branch has drawn."""
        return [draws.probabilities[row] for draws, row in self.drawn[branch]]

    def place(self, branch: int) -> Place:
        """Where the branch's next token is drawn: whenever that is, it is the same token."""
        return self.place_at(branch, self.cache.lengths[branch])

    def place_at(self, branch: int, depth: int) -> Place:
        """Where the branch's token at `depth` is drawn."""
        return Place(self.round_index, _BRANCH_LANES + depth, branch, self.next_fan_out[depth])

    def next_batch(self, branches: list[int], target_ids: list[int]) -> ForwardBatch:
        """The pass that gives each of `branches` its next token: the bonus token first, then what it drew last.

        A branch sees the trunk up to its own acceptance length, and itself.
        """
        first, used = self.used, self.used + len(branches)
        starts = np.array([self.first_positions[branch] for branch in branches])
        visible = np.zeros((len(branches), used), np.bool_)
        visible[:, : self.trunk_length] = np.arange(self.trunk_length) < starts[:, None]
        for row, branch in enumerate(branches):
            visible[row, [*self.slots[branch], first + row]] = True
        depths = np.array([self.cache.lengths[branch] for branch in branches])
        return ForwardBatch(
            token_ids=torch.tensor([[self._last_token(branch, target_ids) for branch in branches]]),
            positions=torch.from_numpy(starts + depths).unsqueeze(0),
            slots=torch.arange(first, used).unsqueeze(0),
            used=used,
            visible=torch.from_numpy(visible).unsqueeze(0),
            num_logits=len(branches),
            first=first,
        )

    def _last_token(self, branch: int, target_ids: list[int]) -> int:
        if not self.drawn[branch]:
            return self.cache.outcomes[branch].bonus_token_id
        draws, row = self.drawn[branch][-1]
        return target_ids[draws.columns[row]]

    def text(self, branch: int, context: list[int], drafted: list[int], target_ids: list[int]) -> list[int]:
        """What the branch continues: the context, what its outcome accepts, its bonus token, and what it drew since."""
        outcome = self.cache.outcomes[branch]
        drawn = [target_ids[draws.columns[row]] for draws, row in self.drawn[branch]]
        return [*context, *drafted[: outcome.accepted], outcome.bonus_token_id, *drawn]

    def add(self, branches: list[int], draws: Draws) -> None:
        """Take what the pass over `branches` drew: each of them is one token longer."""
        for row, branch in enumerate(branches):
            self.slots[branch].append(self.used + row)
            self.drawn[branch].append((draws, row))
            self.cache.lengths[branch] += 1
        self.used += len(branches)
