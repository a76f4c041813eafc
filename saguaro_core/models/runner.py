"""Runs one causal language model over a slotted cache: the only place where a forward happens.

A forward takes a ForwardBatch: n tokens for each of b rows, their positions (for rotary embeddings), the cache slots
that their keys and values take, and what each of them may see. Prefill, verification, draft steps and branch steps
are all this one call.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from saguaro_core.errors import ModelError
from saguaro_core.models.attention import fold_mask, num_query_groups, use_slotted_attention
from saguaro_core.models.kv_cache import SlotPlan, SlottedCache


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Inputs of one forward.

    token_ids, positions, slots: int64 [b, n]. used: slots in use after this forward. visible: bool [b, n, used], or
    None when every query may see every used slot. num_logits: how many of the last tokens get logits (0: none, the
    cache is filled only). first: the first slot when the slots of every row are the consecutive ones from it, else
    None. rows: the cache row of each batch row, None for 0..b-1. lengths: how many tokens of each batch row are real,
    which are its last ones; None: all. What stands before them is padding: it takes slot used - 1, which no real token
    takes or sees, and sees that slot only.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    used: int
    visible: Tensor | None
    num_logits: int
    first: int | None = None
    rows: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None


def trunk_batch(token_ids: list[int], start: int, num_logits: int) -> ForwardBatch:
    """A batch of one row that continues the trunk, where a token's slot is its position, at `start`."""
    n = len(token_ids)
    positions = torch.arange(start, start + n).unsqueeze(0)
    visible = None if n == 1 else torch.arange(start + n) <= positions.unsqueeze(-1)
    return ForwardBatch(torch.tensor([token_ids]), positions, positions, start + n, visible, num_logits, first=start)


class Runner(Protocol):
    """What decoding needs of a model. `vocabulary_size` counts logits columns, `context_length` positions."""

    vocabulary_size: int
    context_length: int

    def forward(self, batch: ForwardBatch) -> Tensor | None:
        """Logits [b, num_logits, V] in float32, None if num_logits is 0."""
        ...

    def move(self, source: list[int], first: int, row: int = 0) -> None:
        """Copy cache slots `source` of one cache row to its consecutive slots from `first` on."""
        ...

    def keep_rows(self, count: int) -> None:
        """Forget the cache rows from `count` on and free their memory."""
        ...


Parts = Generator[None, None, Tensor | None]
"""A forward that is left for a moment after each of its parts, and returns what it gives."""


@runtime_checkable
class DivisibleRunner(Protocol):
    """A Runner whose forwards can be left before their end: what they wrote until then must not be looked at."""

    num_parts: int

    def forward_in_parts(self, batch: ForwardBatch) -> Parts:
        """The same as forward, in `num_parts` parts of about equal length."""
        ...


class ModelRunner:
    """A Runner over a transformers model whose attention is the slotted one."""

    def __init__(
        self, model: PreTrainedModel, *, vocabulary_size: int, context_length: int, device: torch.device
    ) -> None:
        use_slotted_attention(model)
        self.model = model
        self.vocabulary_size = vocabulary_size
        self.context_length = context_length
        self.device = device
        self.cache = SlottedCache(model.config.num_hidden_layers)
        self._num_groups = num_query_groups(model.config)
        self._dtype = torch.float32 if device.type == "cpu" else model.dtype

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor | None:
        """Run the model; logits of padded vocabulary entries are cut off. Raises ModelError on NaN."""
        rows = batch.rows or range(len(batch.slots))
        self.cache.reserve(batch.used, max(rows) + 1)
        self.cache.plan = SlotPlan(batch.slots.to(self.device), batch.used, batch.first, tuple(rows))
        mask = (
            None if batch.visible is None else fold_mask(batch.visible.to(self.device), self._num_groups, self._dtype)
        )
        logits: Tensor = self.model(
            input_ids=batch.token_ids.to(self.device),
            position_ids=batch.positions.to(self.device),
            attention_mask=mask,
            cache=self.cache,
            use_cache=True,
            # 0 would mean all of them: one row of logits is made and dropped instead.
            logits_to_keep=max(batch.num_logits, 1),
        ).logits
        if batch.num_logits == 0:
            return None
        logits = logits[..., : self.vocabulary_size].float()
        if bool(torch.isnan(logits.sum())):
            raise ModelError("the model returned NaN logits: its weights or its number format do not fit this device.")
        return logits

    @torch.inference_mode()
    def move(self, source: list[int], first: int, row: int = 0) -> None:
        """Copy the keys and values at slots `source` over the slots from `first` on, in one cache row."""
        self.cache.move(torch.tensor(source), first, row)

    @torch.inference_mode()
    def keep_rows(self, count: int) -> None:
        """Forget the cache rows from `count` on and free their memory."""
        self.cache.keep_rows(count)
