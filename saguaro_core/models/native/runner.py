"""A Runner over the compiled decoder: a forward is one call for its layers, or one for each, and one for the head."""

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from saguaro_core.errors import ModelError
from saguaro_core.models.kv_cache import SLOT_BLOCK
from saguaro_core.models.native.decoder import read_out, run_layers
from saguaro_core.models.native.packing import KIND_NAMES, Packed, unpack_rows
from saguaro_core.models.native.tile import TILE
from saguaro_core.models.native.weights import DecoderWeights
from saguaro_core.models.runner import ForwardBatch, Parts


class NativeRunner:
    """Runs DecoderWeights. Rows of a forward do not influence each other, down to the last bit.

    `rotary` is the model's own module of rotary embeddings; `threads` the cores that products are shared out to.
    """

    def __init__(
        self, weights: DecoderWeights, rotary: nn.Module, *, vocabulary_size: int, context_length: int, threads: int
    ) -> None:
        self.vocabulary_size, self.context_length = vocabulary_size, context_length
        self.weights = weights
        self.num_bytes = sum(packed.num_bytes for packed in weights.all_packed)
        self._matrices = np.array([[[*_place(m), m.num_inputs] for m in layer] for layer in weights.matrices], np.int64)
        self._head = np.array([*_place(weights.head), weights.head.num_outputs], np.int64)
        self._rotary = _RotaryTable(rotary, weights.head_dim)
        self._threads = _start_threads(threads) if threads > 1 else None
        self._cache = _Cache(len(weights.matrices), weights.num_kv_heads, weights.head_dim)

    def describe(self) -> str:
        """How the weights are held."""
        held = {KIND_NAMES[packed.kind] for packed in self.weights.all_packed}
        return " and ".join(sorted(held))

    @property
    def num_parts(self) -> int:
        """Parts of a forward: the layers, one each, and the head."""
        return len(self._matrices) + 1

    def forward(self, batch: ForwardBatch) -> Tensor | None:
        """Run the model over the real tokens of a batch. Raises ModelError on NaN."""
        inputs = self._prepare(batch)
        self._run_layers(inputs, 0, len(self._matrices))
        return self._read_out(inputs)

    def forward_in_parts(self, batch: ForwardBatch) -> Parts:
        """The same, left for a moment after each layer."""
        inputs = self._prepare(batch)
        for layer in range(len(self._matrices)):
            self._run_layers(inputs, layer, layer + 1)
            yield
        return self._read_out(inputs)

    def _prepare(self, batch: ForwardBatch) -> "_Inputs":
        tokens = _Tokens(batch)
        self._cache.reserve(batch.used, int(tokens.rows.max()) + 1)
        x = unpack_rows(self.weights.embedding, tokens.token_ids)
        return _Inputs(tokens, x, *self._rotary.at(tokens.positions), num_logits=batch.num_logits)

    def _run_layers(self, inputs: "_Inputs", first: int, last: int) -> None:
        weights, tokens = self.weights, inputs.tokens
        run_layers(
            inputs.x,
            first,
            last,
            self._matrices,
            weights.norms,
            weights.biases,
            weights.head_norms,
            np.float32(weights.eps),
            np.float32(weights.scaling),
            inputs.cos,
            inputs.sin,
            tokens.slots,
            tokens.rows,
            tokens.prefix,
            tokens.extra,
            tokens.num_extra,
            self._cache.keys,
            self._cache.values,
            self._threads,
        )

    def _read_out(self, inputs: "_Inputs") -> Tensor | None:
        if inputs.num_logits == 0:
            return None
        weights, tokens, eps = self.weights, inputs.tokens, np.float32(self.weights.eps)
        norm, bias = weights.norms[-1], weights.head_bias
        logits = read_out(inputs.x, tokens.wanted, norm, self._head, bias, eps, self._threads)
        if np.isnan(logits[:, 0]).any():
            self._cache.clear()  # Weight 0 does not hide a NaN: it must not lie where later texts only do not look.
            raise ModelError("the model returned NaN logits: its weights do not fit this device's number format.")
        return tokens.spread(logits[:, : self.vocabulary_size])

    def move(self, source: list[int], first: int, row: int = 0) -> None:
        """Copy cache slots `source` of one cache row to its consecutive slots from `first` on."""
        self._cache.move(np.array(source, np.int64), first, row)

    def keep_rows(self, count: int) -> None:
        """Forget the cache rows from `count` on and free their memory."""
        self._cache.keep_rows(count)


class _Tokens:
    """The real tokens of a batch, one after the other: where they are written, what they see, which get logits."""

    def __init__(self, batch: ForwardBatch) -> None:
        count, n = batch.token_ids.shape
        self.shape = (count, batch.num_logits)
        if count == 1 and batch.lengths is None:
            self._take_all(batch, n)
        else:
            self._take_real(batch, n)
        self._set_visible(batch)

    def _take_all(self, batch: ForwardBatch, n: int) -> None:
        """One row without padding, which is every forward of a run alone."""
        self._is_real: NDArray[np.bool_] | None = None
        self._has_logits: NDArray[np.bool_] | None = None
        self.token_ids, self.positions, self.slots = (
            values.numpy()[0] for values in (batch.token_ids, batch.positions, batch.slots)
        )
        self.rows = np.full(n, 0 if batch.rows is None else batch.rows[0], np.int64)
        self.wanted = np.arange(n - batch.num_logits, n)

    def _take_real(self, batch: ForwardBatch, n: int) -> None:
        count = len(batch.token_ids)
        lengths = batch.lengths or (n,) * count
        self._is_real = is_real = np.arange(n) >= (n - np.array(lengths))[:, None]
        self.token_ids, self.positions, self.slots = (
            values.numpy()[is_real] for values in (batch.token_ids, batch.positions, batch.slots)
        )
        self.rows = np.repeat(np.array(batch.rows or range(count), np.int64), lengths)
        self._has_logits = has_logits = is_real[:, n - batch.num_logits :]
        numbers = np.cumsum(is_real).reshape(count, n) - 1
        self.wanted = numbers[:, n - batch.num_logits :][has_logits].astype(np.int64)

    def _set_visible(self, batch: ForwardBatch) -> None:
        """Split what each token sees into a prefix of the slots and the slots after its first gap."""
        num_tokens = len(self.token_ids)
        self.num_extra, self.extra = np.zeros(num_tokens, np.int64), np.zeros((num_tokens, 1), np.int64)
        if batch.visible is None:
            self.prefix = np.full(num_tokens, batch.used, np.int64)
            return
        visible: NDArray[np.bool_] = batch.visible.numpy()
        visible = visible[0] if self._is_real is None else visible[self._is_real]
        self.prefix = visible.argmin(1)
        self.prefix[visible.all(1)] = visible.shape[1]
        self.num_extra = visible.sum(1) - self.prefix
        most = int(self.num_extra.max())
        if most == 0:
            return
        self.extra = np.zeros((num_tokens, most), np.int64)
        token, slot = np.nonzero(visible & (np.arange(visible.shape[1]) >= self.prefix[:, None]))
        place = np.arange(len(token)) - (np.cumsum(self.num_extra) - self.num_extra)[token]
        self.extra[token, place] = slot

    def spread(self, logits: NDArray[np.float32]) -> Tensor:
        """[b, num_logits, V] of the rows of `logits`; padding stays 0."""
        if self._has_logits is None or self._has_logits.all():
            return torch.from_numpy(np.ascontiguousarray(logits)).view(*self.shape, -1)
        full = np.zeros((*self.shape, logits.shape[1]), np.float32)
        full[self._has_logits] = logits
        return torch.from_numpy(full)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What the layers work on: hidden states x [m, H], which they change, and the rotation of each token, [m, d]."""

    tokens: _Tokens
    x: NDArray[np.float32]
    cos: NDArray[np.float32]
    sin: NDArray[np.float32]
    num_logits: int


class _RotaryTable:
    """cos and sin of the positions asked for so far, as the model's own module makes them."""

    def __init__(self, rotary: nn.Module, head_dim: int) -> None:
        self._rotary = rotary
        self._cos = self._sin = np.zeros((0, head_dim), np.float32)

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """[m, d] each."""
        needed = int(positions.max()) + 1
        if needed > len(self._cos):
            self._extend(-(-needed * 3 // 2 // SLOT_BLOCK) * SLOT_BLOCK)
        return self._cos[positions], self._sin[positions]

    @torch.inference_mode()
    def _extend(self, size: int) -> None:
        made: Any = self._rotary(torch.zeros(1), position_ids=torch.arange(size).unsqueeze(0))
        self._cos, self._sin = (np.ascontiguousarray(part[0].float().numpy()) for part in made)


class _Cache:
    """Keys and values of all layers in the layout of native.attention; grows in whole blocks of slots."""

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        self._sizes = num_layers, num_kv_heads, head_dim
        self._num_rows, self._num_slots = 1, SLOT_BLOCK
        self.keys, self.values = self._empty()

    def _empty(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        num_layers, num_kv, head_dim = self._sizes
        return (
            np.zeros((num_layers, self._num_rows, num_kv, self._num_slots // TILE, head_dim, TILE), np.float32),
            np.zeros((num_layers, self._num_rows, num_kv, head_dim // TILE, self._num_slots, TILE), np.float32),
        )

    def reserve(self, num_slots: int, num_rows: int) -> None:
        """Make room, keeping what is held; slots grow at least by half."""
        if num_slots <= self._num_slots and num_rows <= self._num_rows:
            return
        if num_slots > self._num_slots:
            self._num_slots = -(-max(num_slots, self._num_slots * 3 // 2) // SLOT_BLOCK) * SLOT_BLOCK
        self._num_rows = max(num_rows, self._num_rows)
        keys, values = self.keys, self.values
        self.keys, self.values = self._empty()
        self.keys[:, : keys.shape[1], :, : keys.shape[3]] = keys
        self.values[:, : values.shape[1], :, :, : values.shape[4]] = values

    def clear(self) -> None:
        """Fill everything with zeros."""
        self.keys[:], self.values[:] = 0.0, 0.0

    def keep_rows(self, count: int) -> None:
        """Drop the rows from `count` on."""
        if count < self._num_rows:
            self._num_rows = count
            self.keys, self.values = self.keys[:, :count].copy(), self.values[:, :count].copy()

    def move(self, source: NDArray[np.int64], first: int, row: int) -> None:
        """Copy slots `source` [m] of one row over its slots from `first` on."""
        place = np.arange(first, first + len(source))
        keys, values = self.keys[:, row], self.values[:, row]
        keys[:, :, place // TILE, :, place % TILE] = keys[:, :, source // TILE, :, source % TILE]
        values[:, :, :, place] = values[:, :, :, source]


def _place(packed: Packed) -> tuple[int, int, int]:
    """Format, address of the codes, address of the scales."""
    return packed.kind, packed.codes.ctypes.data, packed.scales.ctypes.data


def _start_threads(wanted: int) -> int:
    """Start numba's threads, which a function that comes from numba's cache takes for granted; how many there are."""
    threads = min(wanted, numba.get_num_threads())
    numba.set_num_threads(threads)
    return threads
