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
    slots: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    num_forwards: int = 0
    on_forward: Callable[[int], None] = lambda number: None

    def forward(self, batch: ForwardBatch) -> Tensor | None:
        self.num_forwards += 1
        self.on_forward(self.num_forwards)
        assert int(batch.positions.max()) < self.context_length, "a position beyond the context was fed"
        assert int(batch.slots.max()) < batch.used, "a slot beyond those in use was written"
        rows = batch.rows or tuple(range(len(batch.slots)))
        for index, row in enumerate(rows):
            slots, positions = batch.slots[index].tolist(), batch.positions[index].tolist()
            for slot, position, token in zip(slots, positions, batch.token_ids[index].tolist(), strict=True):
                self.slots[row, slot] = (position, token)
        if batch.num_logits == 0:
            return None
        return torch.tensor([self._logits(batch, index, row) for index, row in enumerate(rows)])

    def _logits(self, batch: ForwardBatch, index: int, row: int) -> list[list[float]]:
        n = batch.slots.shape[1]
        num_padding = 0 if batch.lengths is None else n - batch.lengths[index]
        places = range(n - batch.num_logits, n)
        nothing = [float("nan")] * self.vocabulary_size
        return [
            nothing if place < num_padding else list(self.table(self._history(batch, index, row, place)))
            for place in places
        ]

    def _history(self, batch: ForwardBatch, index: int, row: int, place: int) -> tuple[int, ...]:
        position = int(batch.positions[index, place])
        seen = range(batch.used) if batch.visible is None else batch.visible[index, place].nonzero().flatten().tolist()
        history = sorted(self.slots[row, slot] for slot in seen)
        assert [place for place, _ in history] == list(range(position + 1)), (history, position)
        return tuple(token for _, token in history)

    def move(self, source: list[int], first: int, row: int = 0) -> None:
        moved = [self.slots[row, slot] for slot in source]
        for offset, content in enumerate(moved):
            self.slots[row, first + offset] = content

    def keep_rows(self, count: int) -> None:
        self.slots = {key: content for key, content in self.slots.items() if key[0] < count}


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
