"""A key-value cache addressed by slots: fixed buffers, written at given slot numbers, forgotten by not looking.

A cache row holds one sequence, a slot of it one token. The runner says before each forward which slots the new tokens
take and how many slots are in use; nothing is ever cropped. Rolling back means using fewer slots; promoting a
prepared branch means copying its slots over the trunk's next ones.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

SLOT_BLOCK = 256


@dataclass(slots=True)
class SlotPlan:
    """Where the next forward writes: `slots` [b, n] of the cache rows `rows` [b]; `used` slots are visible; `first` is
    set when slots are consecutive.
    """

    slots: Tensor
    used: int
    first: int | None
    rows: tuple[int, ...] = (0,)
    row_range: slice | None = field(init=False)

    def __post_init__(self) -> None:
        first, count = self.rows[0], len(self.rows)
        is_range = self.rows == tuple(range(first, first + count))
        self.row_range = slice(first, first + count) if is_range else None


class SlottedLayer(CacheLayerMixin):
    """Keys and values of one layer, each [rows, kv_heads, slots, head_dim], on the layer's own device."""

    def __init__(self, cache: "SlottedCache") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate from the first keys and values seen: their dtype, device and head sizes."""
        shape = self.cache.num_rows, key_states.shape[1], self.cache.num_slots
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write [b, kv_heads, n, head_dim] at the planned rows and slots; return those rows, all slots in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self.cache.plan
        assert self.keys is not None and self.values is not None and plan is not None
        return _write(self.keys, key_states, plan), _write(self.values, value_states, plan)

    def resize(self, num_rows: int, num_slots: int) -> None:
        """Make buffers of another size, keeping what fits."""
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(num_rows, old.shape[1], num_slots, old.shape[-1])
            kept, slots = min(num_rows, old.shape[0]), min(num_slots, old.shape[2])
            new[:kept, :, :slots] = old[:kept, :, :slots]
            setattr(self, name, new)

    def move(self, source: Tensor, first: int, row: int) -> None:
        """Copy what lies at slots `source` [m] of a row to its consecutive slots from `first` on (they may overlap)."""
        if self.keys is None or self.values is None:
            return
        index = source.to(self.keys.device)
        for buffer in (self.keys[row], self.values[row]):
            buffer[:, first : first + len(index)] = buffer.index_select(1, index)

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
        self.num_slots, self.num_rows = num_slots, 1
        self.plan: SlotPlan | None = None
        self.slotted = [SlottedLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.slotted))

    def reserve(self, num_slots: int, num_rows: int = 1) -> None:
        """Make room for `num_slots` slots in `num_rows` rows; slots grow in whole blocks, at least by half."""
        if num_slots <= self.num_slots and num_rows <= self.num_rows:
            return
        if num_slots > self.num_slots:
            wanted = max(num_slots, self.num_slots * 3 // 2)
            self.num_slots = -(-wanted // SLOT_BLOCK) * SLOT_BLOCK
        self.num_rows = max(num_rows, self.num_rows)
        self._resize()

    def keep_rows(self, count: int) -> None:
        """Give the rows from `count` on back."""
        if count < self.num_rows:
            self.num_rows = count
            self._resize()

    def _resize(self) -> None:
        for layer in self.slotted:
            layer.resize(self.num_rows, self.num_slots)

    def move(self, source: Tensor, first: int, row: int = 0) -> None:
        """Copy slots `source` [m] of a row to its consecutive slots from `first` on, in every layer."""
        for layer in self.slotted:
            layer.move(source, first, row)


def _write(buffer: Tensor, states: Tensor, plan: SlotPlan) -> Tensor:
    """Put states [b, kv_heads, n, head_dim] into the buffer [rows, kv_heads, slots, head_dim]: the plan's rows of it,
    with the slots in use. Rows that do not follow each other are copied out.
    """
    rows = buffer if plan.row_range is None else buffer[plan.row_range]
    if plan.first is not None and plan.row_range is not None:
        rows[:, :, plan.first : plan.first + states.shape[2]] = states
    else:
        index = torch.tensor(plan.rows, device=buffer.device).unsqueeze(1)
        buffer[index, :, plan.slots.to(buffer.device)] = states.transpose(1, 2)
    used = rows[:, :, : plan.used]
    return used if plan.row_range is not None else used.index_select(0, torch.tensor(plan.rows, device=buffer.device))
