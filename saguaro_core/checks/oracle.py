"""Scripted models for measurements: real forwards, whose logits are then overruled so that drafted tokens are accepted
as often as wanted.

Random weights never agree with each other. Where rounds have to go on as they would with a real pair, the target says
what a script says, and the draft says the same with a given probability, else another token first and the script's
token second. Both sides derive the script from its settings alone. Times measured over it are those of real forwards;
acceptance and hits are forced, and must be called so.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from saguaro_core.models.runner import ForwardBatch, Runner

_BEST, _SECOND = 2000.0, 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """`acceptance`: how often the draft's first choice is the target's. `second_share`: how often, where it is not,
    the target's token is the draft's second choice.
    """

    vocabulary_size: int
    length: int
    acceptance: float
    second_share: float
    seed: int = 0

    def target_ids(self) -> Tensor:
        """The token that stands at each position [length]."""
        return torch.randint(self.vocabulary_size, (self.length,), generator=self._generator(0))

    def draft_ids(self) -> tuple[Tensor, Tensor]:
        """The draft's first and second choice for each position, [length] each."""
        right = self.target_ids()
        wrong, other = ((right + offset) % self.vocabulary_size for offset in (1, 2))
        agrees = torch.rand(self.length, generator=self._generator(1)) < self.acceptance
        is_second = torch.rand(self.length, generator=self._generator(2)) < self.second_share
        return torch.where(agrees, right, wrong), torch.where(agrees, wrong, torch.where(is_second, right, other))

    def _generator(self, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 8 + stream)


class OracleRunner:
    """A Runner whose forwards are real and whose logits are the script's: `choices` are its best tokens, in order."""

    def __init__(self, inner: Runner, choices: tuple[Tensor, ...]) -> None:
        self.inner, self.choices = inner, choices
        self.vocabulary_size = inner.vocabulary_size
        self.context_length = min(inner.context_length, len(choices[0]) - 1)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor | None:
        """The inner forward, overruled."""
        logits = self.inner.forward(batch)
        if logits is None:
            return None
        predicted = batch.positions[:, -batch.num_logits :] + 1
        values = (_BEST, _SECOND)
        for ids, value in reversed(list(zip(self.choices, values, strict=False))):
            logits.scatter_(-1, ids[predicted].unsqueeze(-1).to(logits.device), value)
        return logits

    def move(self, source: list[int], first: int, row: int = 0) -> None:
        """As the inner runner."""
        self.inner.move(source, first, row)

    def keep_rows(self, count: int) -> None:
        """As the inner runner."""
        self.inner.keep_rows(count)
