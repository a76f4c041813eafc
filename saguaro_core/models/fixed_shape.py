"""Forwards of fixed shape: the same memory and the same kernels each time, so that they can be compiled and, on CUDA,
captured as graphs.

A forward of a few tokens leaves a GPU mostly waiting for the host to launch kernels; a captured graph is launched
whole. Its inputs lie in static buffers: token ids, positions and slots of `width` tokens, and what each of them sees
of the first `bucket` slots. A smaller forward is padded to the next width and bucket. Padding writes to a slot that
nothing sees and sees slot 0, so its numbers stay finite. Keys and values are written by an index tensor; no number
that changes between forwards is part of the function.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from saguaro_core.config import MAX_LOOKAHEAD
from saguaro_core.errors import ModelError
from saguaro_core.models.attention import fold_mask
from saguaro_core.models.captured import Captured
from saguaro_core.models.kv_cache import SlottedCache, SlottedLayer
from saguaro_core.models.runner import ForwardBatch, ModelRunner, trunk_batch

logger = logging.getLogger(__name__)

# More than the largest budget does not come up; forwards of a few tokens cost a GPU what one token costs.
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
# On a GPU the keys of this many slots weigh about a hundredth of the weights, so finer steps would save nothing.
BUCKET = 1024
_STARTING_BUCKETS = 4
# What one request usually needs: a decode, a verification, a pass of branches.
_PREPARED_WIDTHS = (1, 2, 4, 8, 16)
# A hit moves as many slots as were drafted.
_MOVE_WIDTH = MAX_LOOKAHEAD


class _FixedLayer(CacheLayerMixin):
    """One layer's buffers as a fixed-shape forward sees them: written at `slots` [width], read up to `bucket`."""

    def __init__(self, layer: SlottedLayer, slots: Tensor, bucket: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        assert layer.keys is not None and layer.values is not None
        self.keys, self.values = layer.keys[:1], layer.values[:1]  # The fixed forwards serve cache row 0.
        self.slots, self.bucket = slots, bucket
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The buffers are there before a fixed-shape forward is made."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write [1, kv_heads, width, head_dim]; return views of the first `bucket` slots."""
        assert self.keys is not None and self.values is not None
        self.keys.index_copy_(2, self.slots, key_states)
        self.values.index_copy_(2, self.slots, value_states)
        return self.keys[:, :, : self.bucket], self.values[:, :, : self.bucket]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots that are read, and their offset."""
        return self.bucket, 0

    def get_seq_length(self) -> int:
        """Slots that are read."""
        return self.bucket

    def get_max_length(self) -> int:
        """Slots that are read."""
        return self.bucket


class FixedForward:
    """One forward of `width` tokens over `bucket` slots of a cache, as a function without arguments."""

    def __init__(self, runner: "FixedShapeRunner", width: int, bucket: int, *, backend: str | None = None) -> None:
        device = runner.device
        self.model: PreTrainedModel = runner.model
        self.vocabulary_size, self.num_groups, self.dtype = runner.vocabulary_size, runner.num_groups, runner.mask_dtype
        self.width, self.bucket = width, bucket
        self.padding_slot = runner.cache.num_slots - 1
        self.inputs = torch.zeros(3, width, dtype=torch.long, device=device)
        self.visible = torch.ones(1, width, bucket, dtype=torch.bool, device=device)
        self.buffer = runner.cache.slotted[0].keys
        layers = [_FixedLayer(layer, self.inputs[2], bucket) for layer in runner.cache.slotted]
        self.cache = Cache(layers=list(layers))
        function: Callable[[], tuple[Tensor, Tensor]] = self._forward
        if backend is not None:
            # Every shape is a function of its own: without isolation they would share one limit of recompilations.
            function = torch.compile(  # type: ignore[call-overload]  # torch's overloads lack the last option.
                self._forward, backend=backend, dynamic=False, fullgraph=True, isolate_recompiles=True
            )
        self.run = Captured(function)

    def _forward(self) -> tuple[Tensor, Tensor]:
        """Logits [1, width, V] in float32, and whether one of them is not a number."""
        token_ids, positions, _ = self.inputs
        mask = fold_mask(self.visible, self.num_groups, self.dtype)
        logits = self.model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            attention_mask=mask,
            cache=self.cache,
            use_cache=True,
        ).logits
        logits = logits[..., : self.vocabulary_size].float()
        return logits, logits.sum().isnan()

    def load(self, batch: ForwardBatch) -> None:
        """Put a batch of one row into the static inputs, padded."""
        n = batch.token_ids.shape[1]
        inputs = torch.zeros(3, self.width, dtype=torch.long)
        inputs[0, :n], inputs[1, :n], inputs[2, :n] = batch.token_ids[0], batch.positions[0], batch.slots[0]
        inputs[2, n:] = self.padding_slot
        visible = torch.zeros(1, self.width, self.bucket, dtype=torch.bool)
        visible[:, :n, : batch.used] = True if batch.visible is None else batch.visible
        visible[:, n:, 0] = True
        self.inputs.copy_(inputs)
        self.visible.copy_(visible)


class FixedMove:
    """The copy of up to `width` slots to consecutive ones, in every layer at once."""

    def __init__(self, cache: SlottedCache, device: torch.device, width: int) -> None:
        self.width, self.padding_slot = width, cache.num_slots - 1
        self.buffer = cache.slotted[0].keys
        self.slots = torch.full((2, width), self.padding_slot, device=device)
        self.buffers = [
            buffer[:1] for layer in cache.slotted for buffer in (layer.keys, layer.values) if buffer is not None
        ]
        self.run = Captured(self._move)

    def _move(self) -> None:
        source, destination = self.slots
        for buffer in self.buffers:
            buffer.index_copy_(2, destination, buffer.index_select(2, source))

    def load(self, source: list[int], first: int) -> None:
        """Say what to move; padding moves a slot that nothing sees onto itself."""
        padding = [self.padding_slot] * (self.width - len(source))
        self.slots.copy_(torch.tensor([source + padding, [*range(first, first + len(source)), *padding]]))


class FixedShapeRunner(ModelRunner):
    """A ModelRunner whose small forwards of one sequence run in fixed shapes; all others run as in ModelRunner.

    On CUDA each shape is captured as a graph when it is first met. `backend` compiles (torch.compile) what `prepare`
    prepares, and nothing later: no request waits for a compiler.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocabulary_size: int,
        context_length: int,
        device: torch.device,
        backend: str | None = None,
        bucket: int = BUCKET,
    ) -> None:
        super().__init__(model, vocabulary_size=vocabulary_size, context_length=context_length, device=device)
        self.num_groups, self.mask_dtype = self._num_groups, self._dtype
        self.fixed: dict[tuple[int, int], FixedForward] = {}
        self.fixed_move: FixedMove | None = None
        self._backend, self._smallest = backend, bucket
        self._is_cuda = device.type == "cuda"
        self._is_broken = False
        # Buffers that grow take the shapes made for them along, so they start large enough for most chats.
        self.cache.reserve(min(_STARTING_BUCKETS * bucket, self.bucket_of(context_length)) + 1)
        with self._on_device():
            self._stream = torch.cuda.Stream() if self._is_cuda else None
            self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None

    def bucket_of(self, used: int) -> int:
        """How many slots a fixed forward over `used` slots reads: few sizes, at most a quarter more than needed."""
        step = max(self._smallest, (1 << (used - 1).bit_length()) // 8)
        return -(-used // step) * step

    @torch.inference_mode()
    def prepare(self, widths: tuple[int, ...] = _PREPARED_WIDTHS, used: int = 1) -> None:
        """Make (compile, capture) the shapes of these widths over `used` slots, before a request needs them."""
        super().forward(trunk_batch([0], 0, 1))
        for width in widths:
            batch = trunk_batch([0] * width, 0, width)
            key = width, self.bucket_of(max(used, batch.used))
            self._reserve(key)
            if key not in self.fixed and not self._is_broken:
                self._make(key, batch, self._backend)
        if self._is_cuda:
            self._move_for(1, 0)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor | None:
        """As ModelRunner.forward, in a fixed shape where the batch has one."""
        fixed = self._fixed_for(batch)
        if fixed is None:
            return super().forward(batch)
        n = batch.token_ids.shape[1]
        with self._on_device():
            fixed.load(batch)
            logits, is_nan = fixed.run()
            if bool(is_nan):
                raise ModelError(
                    "the model returned NaN logits: its weights or its number format do not fit this device."
                )
            return logits[:, n - batch.num_logits : n].clone()

    @torch.inference_mode()
    def move(self, source: list[int], first: int, row: int = 0) -> None:
        """As ModelRunner.move, in one launch where there is CUDA."""
        fixed = self._move_for(len(source), row) if self._is_cuda else None
        if fixed is None:
            super().move(source, first, row)
            return
        with self._on_device():
            fixed.load(source, first)
            fixed.run()

    def _move_for(self, count: int, row: int) -> FixedMove | None:
        """The move of so many slots, made if it is new; None where only the ordinary way serves."""
        self._forget_stale()
        if self._is_broken or row != 0 or not 0 < count <= _MOVE_WIDTH or not self.cache.slotted[0].is_initialized:
            return None
        if self.fixed_move is None:
            fixed = FixedMove(self.cache, self.device, _MOVE_WIDTH)
            self.fixed_move = fixed if self._try(fixed.run) else None
        return self.fixed_move

    def _fixed_for(self, batch: ForwardBatch) -> FixedForward | None:
        """The forward for a batch's shape, made if it is new; None where only the ordinary way serves."""
        num_rows, n = batch.token_ids.shape
        if self._is_broken or num_rows != 1 or n > WIDTHS[-1] or batch.num_logits == 0 or not self._is_row_0(batch):
            return None
        key = next(width for width in WIDTHS if width >= n), self.bucket_of(batch.used)
        self._reserve(key)
        if not self.cache.slotted[0].is_initialized:
            return None
        return self.fixed.get(key) or self._make(key, batch, None)

    def _is_row_0(self, batch: ForwardBatch) -> bool:
        return batch.rows in (None, (0,)) and batch.lengths is None

    def _reserve(self, key: tuple[int, int]) -> None:
        """Room for the bucket and a padding slot behind it."""
        self.cache.reserve(key[1] + 1)
        self._forget_stale()

    def _forget_stale(self) -> None:
        """Forget what was made for buffers that have been replaced."""
        keys = self.cache.slotted[0].keys
        if any(fixed.buffer is not keys for fixed in self.fixed.values()):
            self.fixed.clear()
        if self.fixed_move is not None and self.fixed_move.buffer is not keys:
            self.fixed_move = None

    def _make(self, key: tuple[int, int], batch: ForwardBatch, backend: str | None) -> FixedForward | None:
        fixed = FixedForward(self, *key, backend=backend)
        fixed.load(batch)
        if not self._try(fixed.run):
            return None
        self.fixed[key] = fixed
        return fixed

    def _try(self, function: Captured[Any]) -> bool:
        """Capture a function (run it, where there is no CUDA). If that fails nothing is tried again."""
        try:
            with self._on_device():
                if self._stream is None:
                    function()
                else:
                    function.capture(self._stream, self._pool)
        except RuntimeError as error:
            logger.warning("forwards of this model cannot be captured, so they run one by one: %s", error)
            self._is_broken = True
            self.fixed.clear()
        return not self._is_broken

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self._is_cuda else nullcontext()
