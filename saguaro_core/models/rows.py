"""Several sequences over one runner: each has a cache row of its own, and their forwards can be made as one.

A sequence works with a RowRunner as it would with a runner of its own. Where several want a forward at the same time,
`forward_together` makes one of it: shorter rows are padded in front, so that the last tokens of all rows line up.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from saguaro_core.models.runner import ForwardBatch, Runner


class RowRunner:
    """A Runner that keeps to one row of another runner's cache."""

    def __init__(self, runner: Runner, row: int) -> None:
        self.runner, self.row = runner, row
        self.vocabulary_size, self.context_length = runner.vocabulary_size, runner.context_length

    def forward(self, batch: ForwardBatch) -> Tensor | None:
        """Forward a batch of one row in this row."""
        return self.runner.forward(replace(batch, rows=(self.row,)))

    def move(self, source: list[int], first: int, row: int = 0) -> None:
        """Copy slots within this row."""
        self.runner.move(source, first, self.row)

    def keep_rows(self, count: int) -> None:
        """The row is not this runner's to give back."""


def forward_together(runner: Runner, batches: Sequence[ForwardBatch], rows: Sequence[int]) -> tuple[Tensor | None, ...]:
    """One forward for batches of one row each, in these cache rows; the logits of each as its own forward gives them,
    [1, num_logits, V].
    """
    logits = runner.forward(merge(batches, rows))
    if logits is None:
        return (None,) * len(batches)
    total = logits.shape[1]
    return tuple(
        logits[index : index + 1, total - batch.num_logits :] if batch.num_logits else None
        for index, batch in enumerate(batches)
    )


def merge(batches: Sequence[ForwardBatch], rows: Sequence[int]) -> ForwardBatch:
    """The batches of one row each as one of several rows, padded in front to the longest of them."""
    if len(batches) == 1:
        return replace(batches[0], rows=tuple(rows))
    lengths = tuple(batch.token_ids.shape[1] for batch in batches)
    n, used = max(lengths), max(batch.used for batch in batches)
    is_padded = min(lengths) < n
    used += is_padded
    shape = len(batches), n
    token_ids, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    slots = torch.full(shape, used - 1)
    visible = torch.zeros(*shape, used, dtype=torch.bool)
    for row, (batch, length) in enumerate(zip(batches, lengths, strict=True)):
        start = n - length
        token_ids[row, start:], positions[row, start:] = batch.token_ids[0], batch.positions[0]
        slots[row, start:] = batch.slots[0]
        visible[row, start:, : batch.used] = True if batch.visible is None else batch.visible[0]
        visible[row, :start, used - 1] = True
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        used=used,
        visible=visible,
        num_logits=max(batch.num_logits for batch in batches),
        rows=tuple(rows),
        lengths=lengths if is_padded else None,
    )
