"""A key-value cache addressed by slots: fixed buffers, written at given slot numbers, forgotten by not looking.

A slot is a row of the buffer. The runner says before each forward which slots the new tokens take and how many slots
are in use; nothing is ever cropped. Rolling back means using fewer slots; promoting a prepared branch means copying
its rows over the trunk's next slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

SLOT_BLOCK = 256


@dataclass(slots=True)
class SlotPlan:
    """Where the next forward writes: `slots` [b, n]; `used` slots are visible; `first` is set when slots are
    consecutive.
    """

    slots: Tensor
    used: int
    first: int | None


class SlottedLayer(CacheLayerMixin):
    """Keys and values of one layer, each [b, kv_heads, slots, head_dim], on the layer's own device."""

    def __init__(self, cache: "SlottedCache") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate from the first keys and values seen: their dtype, device and head sizes."""
        batch, heads = key_states.shape[:2]
        size = self.cache.num_slots
        self.keys = key_states.new_zeros(batch, heads, size, key_states.shape[-1])
        self.values = value_states.new_zeros(batch, heads, size, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write [b, kv_heads, n, head_dim] at the planned slots; return views of all slots in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self.cache.plan
        assert self.keys is not None and self.values is not None and plan is not None
        if plan.first is not None:
            end = plan.first + key_states.shape[2]
            self.keys[:, :, plan.first : end] = key_states
            self.values[:, :, plan.first : end] = value_states
        else:
            slots = plan.slots.to(self.keys.device)
            rows = torch.arange(slots.shape[0], device=slots.device).unsqueeze(1)
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys[:, :, : plan.used], self.values[:, :, : plan.used]

    def grow(self, num_slots: int) -> None:
        """Enlarge the buffers, keeping what they hold."""
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(*old.shape[:2], num_slots, old.shape[-1])
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def move(self, source: Tensor, first: int) -> None:
        """Copy the rows at slots `source` [m] to the consecutive slots from `first` on (they may overlap)."""
        if self.keys is None or self.values is None:
            return
        index = source.to(self.keys.device)
        for buffer in (self.keys, self.values):
            buffer[:, :, first : first + len(index)] = buffer.index_select(2, index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys in use and their offset: masks are made by the runner, this only answers transformers."""
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        """Slots in use in the current forward."""
        return self.cache.plan.used if self.cache.plan is not None else 0

    def get_max_length(self) -> int:
        """Slots in the buffer; it grows on demand."""
        return self.cache.num_slots


class SlottedCache(Cache):
    """One SlottedLayer for each layer of a model, all following the same plan."""

    def __init__(self, num_layers: int, num_slots: int = SLOT_BLOCK) -> None:
        self.num_slots = num_slots
        self.plan: SlotPlan | None = None
        self.slotted = [SlottedLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.slotted))

    def reserve(self, num_slots: int) -> None:
        """Make room for `num_slots` slots; buffers grow in whole blocks, at least by half."""
        if num_slots <= self.num_slots:
            return
        wanted = max(num_slots, self.num_slots * 3 // 2)
        self.num_slots = -(-wanted // SLOT_BLOCK) * SLOT_BLOCK
        for layer in self.slotted:
            layer.grow(self.num_slots)

    def move(self, source: Tensor, first: int) -> None:
        """Copy slots `source` [m] to the consecutive slots from `first` on, in every layer."""
        for layer in self.slotted:
            layer.move(source, first)
