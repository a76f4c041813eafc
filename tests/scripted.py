"""Tiny models with scripted distributions, and engines in one process around them.

ScriptedRunner stands where a transformer would: it keeps the token and position written to every slot, and its logits
depend on the visible tokens before each query, so a wrong mask, slot, position or move changes what it says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from saguaro_core.models.runner import ForwardBatch

Table = Callable[[tuple[int, ...]], Sequence[float]]


@dataclass
class ScriptedRunner:
    """A Runner whose logits for the next token are `table(history)`, history being the visible tokens in order of
    position.
    """

    table: Table
    vocabulary_size: int
    context_length: int = 4096
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)
    num_forwards: int = 0
    on_forward: Callable[[int], None] = lambda number: None

    def forward(self, batch: ForwardBatch) -> Tensor | None:
        self.num_forwards += 1
        self.on_forward(self.num_forwards)
        tokens, positions = batch.token_ids[0].tolist(), batch.positions[0].tolist()
        slots = batch.slots[0].tolist()
        assert max(positions) < self.context_length, "a position beyond the context was fed"
        assert max(slots) < batch.used, "a slot beyond those in use was written"
        for slot, position, token in zip(slots, positions, tokens, strict=True):
            self.slots[slot] = (position, token)
        if batch.num_logits == 0:
            return None
        rows = range(len(tokens) - batch.num_logits, len(tokens))
        logits = [list(self.table(self._history(batch, row, positions[row]))) for row in rows]
        return torch.tensor([logits], dtype=torch.float32)

    def _history(self, batch: ForwardBatch, row: int, position: int) -> tuple[int, ...]:
        seen = range(batch.used) if batch.visible is None else batch.visible[0, row].nonzero().flatten().tolist()
        history = sorted(self.slots[slot] for slot in seen)
        assert [place for place, _ in history] == list(range(position + 1)), (history, position)
        return tuple(token for _, token in history)

    def move(self, source: list[int], first: int) -> None:
        rows = [self.slots[slot] for slot in source]
        for offset, row in enumerate(rows):
            self.slots[first + offset] = row


def markov(rows: Sequence[Sequence[float]]) -> Table:
    """A table of log-probabilities that depends on the last token only; rows[i] follows token i."""
    logs = torch.tensor(rows, dtype=torch.float64).clamp_min(1e-30).log().tolist()
    return lambda history: logs[history[-1]]


def hashed(vocabulary_size: int, sharpness: float, salt: int, order: int = 3) -> Table:
    """A deterministic pseudo-random table that depends on the last `order` tokens."""
    known: dict[tuple[int, ...], list[float]] = {}

    def table(history: tuple[int, ...]) -> list[float]:
        key = history[-order:]
        if key not in known:
            generator = torch.Generator().manual_seed(hash((salt, *key)) & 0x7FFFFFFF)
            known[key] = (torch.randn(vocabulary_size, generator=generator) * sharpness).tolist()
        return known[key]

    return table


def mixed(first: Table, second: Table, share: float) -> Table:
    """A table between two others: a draft that agrees with its target now and then."""
    return lambda history: [(1 - share) * a + share * b for a, b in zip(first(history), second(history), strict=True)]
