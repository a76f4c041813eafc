"""What the draft holds between two outcomes: the speculation under verification, and the branches grown meanwhile.

Trunk tokens live in cache slots equal to their positions. Branch b at depth d lives in slot trunk_length + d * B + b,
so the slots in use stay consecutive, until a hit moves its rows into the trunk.
"""

from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from saguaro_core.draft.proposer import Draws, Proposer
from saguaro_core.fan_out import CacheState
from saguaro_core.models.runner import ForwardBatch
from saguaro_core.speculation_cache import SpeculationCache
from saguaro_core.verification import Outcome


@dataclass(slots=True)
class Drafted:
    """The speculation under verification. `rank_scores` [n] are known for its first positions."""

    token_ids: list[int] = field(default_factory=list)
    q: list[float] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)
    rank_scores: list[Tensor] = field(default_factory=list)
    state: CacheState = "miss"

    def add(self, proposer: Proposer, draws: Draws, row: int) -> None:
        """Append the token that `draws` chose in one of its rows."""
        column = draws.columns[row]
        self.token_ids.append(proposer.target_ids[column])
        self.q.append(proposer.probability(draws.logits[row], column))
        self.rank_scores.append(draws.rank_scores[row])
        if draws.q is not None:
            self.distributions.append(draws.q[row])


@dataclass(slots=True)
class Branches:
    """The cache under construction: B outcomes, what each of their branches sees, and what each pass drew.

    first_positions: the position of each branch's first token. visible: bool [B, trunk_length + num_passes * B].
    """

    cache: SpeculationCache = field(default_factory=SpeculationCache)
    fan_out: tuple[int, ...] = ()
    trunk_length: int = 0
    num_passes: int = 0
    first_positions: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    visible: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.bool))
    draws: list[Draws] = field(default_factory=list)

    @classmethod
    def plant(
        cls, outcomes: list[Outcome], fan_out: tuple[int, ...], num_context: int, trunk_length: int, num_passes: int
    ) -> Self:
        """Branches for `outcomes` of the speculation that fills the trunk from `num_context` to `trunk_length`.

        A branch sees the trunk up to its own acceptance length, and itself.
        """
        first_positions = num_context + torch.tensor([outcome.accepted for outcome in outcomes], dtype=torch.long)
        trunk = torch.arange(trunk_length) < first_positions.unsqueeze(1)
        own = torch.eye(len(outcomes), dtype=torch.bool).repeat(1, num_passes)
        visible = torch.cat([trunk, own], dim=1)
        return cls(SpeculationCache(outcomes), fan_out, trunk_length, num_passes, first_positions, visible)

    @property
    def is_complete(self) -> bool:
        """Whether no pass is left to do."""
        return not self.cache.outcomes or self.cache.depth >= self.num_passes

    def next_batch(self, target_ids: list[int]) -> ForwardBatch:
        """The pass that gives every branch its next token: its bonus token first, then what it drew last."""
        outcomes, depth = self.cache.outcomes, self.cache.depth
        if depth == 0:
            token_ids = [outcome.bonus_token_id for outcome in outcomes]
        else:
            token_ids = [target_ids[column] for column in self.draws[-1].columns]
        first = self.trunk_length + depth * len(outcomes)
        used = first + len(outcomes)
        return ForwardBatch(
            token_ids=torch.tensor([token_ids]),
            positions=(self.first_positions + depth).unsqueeze(0),
            slots=torch.arange(first, used).unsqueeze(0),
            used=used,
            visible=self.visible[:, :used].unsqueeze(0),
            num_logits=len(outcomes),
            first=first,
        )

    def add(self, draws: Draws) -> None:
        """Take what the pass drew: every branch is one token longer."""
        self.draws.append(draws)
        self.cache.depth += 1

    def slots_of(self, branch: int, num_tokens: int) -> list[int]:
        """Slots of a branch's first tokens."""
        return [self.trunk_length + depth * len(self.cache.outcomes) + branch for depth in range(num_tokens)]
