"""A runner that keeps books: which token lies in which slot, what every query may see, where each forward continues."""

from dataclasses import dataclass, field

from torch import Tensor

from saguaro_core.models.runner import ForwardBatch, Runner


@dataclass
class WatchedRunner:
    """Passes every call on to a real runner and checks it against its own account of the slots.

    A forward is on the trunk when its slots equal its positions; `trunk` lists them as (first slot, tokens). `length`
    is how far the trunk reaches. `histories` are the tokens that the last query of each trunk forward saw.
    """

    inner: Runner
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)
    trunk: list[tuple[int, int]] = field(default_factory=list)
    histories: list[tuple[int, ...]] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    length: int = 0

    def __post_init__(self) -> None:
        self.vocabulary_size, self.context_length = self.inner.vocabulary_size, self.inner.context_length

    def forward(self, batch: ForwardBatch) -> Tensor | None:
        tokens, positions = batch.token_ids[0].tolist(), batch.positions[0].tolist()
        slots = batch.slots[0].tolist()
        self.slots.update(zip(slots, zip(positions, tokens, strict=True), strict=True))
        histories = [self._history(batch, row, position) for row, position in enumerate(positions)]
        if slots == positions:
            self._continue_at(slots[0])
            self.trunk.append((slots[0], len(slots)))
            self.histories.append(histories[-1])
            self.length = slots[-1] + 1
        return self.inner.forward(batch)

    def _history(self, batch: ForwardBatch, row: int, position: int) -> tuple[int, ...]:
        seen = range(batch.used) if batch.visible is None else batch.visible[0, row].nonzero().flatten().tolist()
        history = sorted(self.slots[slot] for slot in seen)
        assert [place for place, _ in history] == list(range(position + 1)), "a query saw a hole or a stray slot"
        return tuple(token for _, token in history)

    def _continue_at(self, first: int) -> None:
        """Forgetting is allowed, a hole is not; `gaps` lists where slots were written again."""
        assert first <= self.length, f"the trunk reaches to {self.length}, but was continued at {first}"
        if 0 < first < self.length:
            self.gaps.append((first, self.length))

    def keep_rows(self, count: int) -> None:
        self.inner.keep_rows(count)

    def move(self, source: list[int], first: int, row: int = 0) -> None:
        rows = [self.slots[slot] for slot in source]
        assert [position for position, _ in rows] == list(range(first, first + len(rows)))
        self._continue_at(first)
        for offset, held in enumerate(rows):
            self.slots[first + offset] = held
        self.length = first + len(rows)
        self.inner.move(source, first, row)
