"""The inner loop of every product, written as LLVM vector code: x @ W.T for a few rows and 32 outputs.

The compiler's own vectoriser would sum along the inputs, so that a row's result could depend on how many rows are
computed with it. Here each lane of a vector belongs to one output and adds its products in the order of
the inputs: a row has the same bits alone and among others, which makes verification agree with plain decoding
exactly. LLVM lowers the vectors to whatever the processor has.

Quantised weights are multiplied as integers: codes by inputs of 16 bits, which share one scale in each block. The sum
of a block is exact; the rounding of the inputs, at most 2^-16 of the largest in their block, is the only error.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from saguaro_core.models.native.emitter import (
    BYTE_PAIRS,
    FLOATS,
    INTS,
    IS_WIDE,
    LANES,
    SHORT_PAIRS,
    Emitter,
    Vectors,
    constant,
)

TILE = 16
"""Outputs that are packed together: their weights for one input follow each other."""
PAIR = 2 * TILE
"""Outputs of two neighbouring tiles, the least that is computed at once."""
BLOCK = 32
"""Inputs that share one scale and one offset."""
X_BLOCK_BYTES = 8
"""Scale and sum of a block of x."""
MAX_ROWS = 12 if IS_WIDE else 6
"""More rows than this would not keep their sums in registers."""

_UNROLLED_INPUTS = 8
_UNROLLED_INTEGER_INPUTS = 4  # LLVM may reorder sums of integers: of many steps at once it keeps too much in hand.
_PREFETCH_BYTES = 4096  # Of all tiles read at once. Measured: nearer ones arrive late, for memory answers slowly.
_FEW_ROWS = 2


# -- formats: how the bytes of a tile become vectors ------------------------------------------------------------------


def _float_step(emit: Emitter, address: Any, vectors: int) -> list[Vectors]:
    return [[emit.load(address, 4 * LANES * v, FLOATS, 4) for v in range(vectors)]]


def _half_step(emit: Emitter, address: Any, vectors: int) -> list[Vectors]:
    return [[emit.halves(address, 2 * LANES * v) for v in range(vectors)]]


def _int8_step(emit: Emitter, address: Any, vectors: int) -> list[Vectors]:
    codes = [emit.load(address, 2 * LANES * v, BYTE_PAIRS, 1) for v in range(vectors)]
    return [[emit.builder.sext(code, SHORT_PAIRS) for code in codes]]


def _int4_step(emit: Emitter, address: Any, vectors: int) -> list[Vectors]:
    """Four inputs: the low halves of the bytes are the first two, the high halves the others."""
    builder = emit.builder
    codes = [builder.zext(emit.load(address, 2 * LANES * v, BYTE_PAIRS, 1), SHORT_PAIRS) for v in range(vectors)]
    low = [builder.and_(code, ir.Constant(SHORT_PAIRS, [15] * 2 * LANES)) for code in codes]
    high = [builder.lshr(code, ir.Constant(SHORT_PAIRS, [4] * 2 * LANES)) for code in codes]
    return [low, high]


@dataclass(frozen=True, slots=True)
class Format:
    """How weights are stored. A step is what is decoded at once: `step_inputs` inputs of a tile in `step_bytes` bytes,
    in `parts` that are multiplied one after the other.

    is_integer: weight = scale * code, x being int16; scales are float16 [block][output]. has_offset: + offset,
    [block][scale, offset][output].
    """

    decode: Callable[[Emitter, Any, int], list[Vectors]]
    step_inputs: int
    step_bytes: int
    parts: int = 1
    is_integer: bool = False
    has_offset: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of a tile."""
        return BLOCK // self.step_inputs * self.step_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales and offsets of one block of a tile."""
        return 2 * TILE * (self.is_integer + self.has_offset)

    @property
    def x_bytes(self) -> int:
        """Bytes of one input."""
        return 2 if self.is_integer else 4


FORMATS = {
    "float": Format(_float_step, 1, 4 * TILE),
    "half": Format(_half_step, 1, 2 * TILE),
    "int8": Format(_int8_step, 2, 2 * TILE, is_integer=True),
    "int8_offset": Format(_int8_step, 2, 2 * TILE, is_integer=True, has_offset=True),
    "int4_offset": Format(_int4_step, 4, 2 * TILE, parts=2, is_integer=True, has_offset=True),
}


@dataclass(frozen=True, slots=True)
class _Rows:
    """Addresses of the rows of a product: x, the scale and sum of each of its blocks, and the result."""

    x: list[Any]
    x_blocks: list[Any]
    out: list[Any]


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Addresses of the weights and scales of the tiles that are read at once, and the bytes between tiles."""

    weights: list[Any]
    scales: list[Any]
    stride: Any


def _write_block(
    emit: Emitter, form: Format, tiles: list[Any], ahead: Any, x_rows: list[Any], sums: list[Vectors]
) -> None:
    """sums += weights * x, or codes * x, for one block of each tile, given by its address; prefetches `ahead` of it."""
    unrolled = (_UNROLLED_INTEGER_INPUTS if form.is_integer else _UNROLLED_INPUTS) // form.step_inputs
    multiply = emit.multiply_pairs if form.is_integer else emit.multiply
    part_bytes = form.step_inputs // form.parts * form.x_bytes
    with cgutils.for_range(emit.builder, constant(BLOCK // form.step_inputs // unrolled)) as loop:
        bases = [emit.at(tile, loop.index, unrolled * form.step_bytes) for tile in tiles]
        x_base = [emit.at(x, loop.index, unrolled * form.step_inputs * form.x_bytes) for x in x_rows]
        for base in bases:
            later = emit.builder.add(base, ahead)
            for offset in range(0, unrolled * form.step_bytes, 64):
                emit.prefetch(later, offset)
        for step in range(unrolled):
            addresses = [emit.builder.add(base, constant(step * form.step_bytes)) for base in bases]
            decoded = [form.decode(emit, address, TILE // LANES) for address in addresses]
            for part in range(form.parts):
                weights = [vector for tile in decoded for vector in tile[part]]
                multiply(weights, x_base, (step * form.parts + part) * part_bytes, sums)


def _write_scales(
    emit: Emitter, form: Format, tiles: list[Any], x_blocks: list[Any], blocks: list[Vectors], sums: list[Vectors]
) -> None:
    """sums += scale * scale of x * block + offset * sum of x; `tiles` are the addresses of the scales of one block."""
    builder = emit.builder
    for v in range(len(sums[0])):
        address, lane = tiles[v * LANES // TILE], v * LANES % TILE
        scale = emit.halves(address, 2 * lane)
        offset = emit.halves(address, 2 * TILE + 2 * lane) if form.has_offset else None
        for row, place in enumerate(vectors[v] for vectors in sums):
            both = builder.fmul(scale, emit.splat(x_blocks[row], 0))
            total = emit.fma(builder.sitofp(builder.load(blocks[row][v]), FLOATS), both, builder.load(place))
            if offset is not None:
                total = emit.fma(offset, emit.splat(x_blocks[row], 4), total)
            builder.store(total, place)


def _prefetch_distance(emit: Emitter, form: Format, tiles: _Tiles, block: Any, num_blocks: Any) -> Any:
    """Bytes from what is read of a tile to what is prefetched. Near the end that lies in a later tile: the next that
    nobody reads yet.
    """
    builder = emit.builder
    distance = _PREFETCH_BYTES // len(tiles.weights)
    is_later = builder.icmp_signed(">=", builder.add(block, constant(distance // form.block_bytes)), num_blocks)
    read_bytes = builder.mul(num_blocks, constant(form.block_bytes))
    skipped = builder.sub(builder.mul(tiles.stride, constant(len(tiles.weights))), read_bytes)
    return builder.add(builder.select(is_later, skipped, constant(0)), constant(distance))


def _write_product(emit: Emitter, form: Format, tiles: _Tiles, rows: _Rows, num_blocks: Any) -> None:
    """All blocks of one tile or of two for some rows."""
    vectors = len(tiles.weights) * TILE // LANES
    sums = emit.variables(len(rows.x), vectors)
    emit.clear(sums)
    blocks = emit.variables(len(rows.x), vectors, INTS) if form.is_integer else sums
    with cgutils.for_range(emit.builder, num_blocks) as loop:
        x_rows = [emit.at(address, loop.index, form.x_bytes * BLOCK) for address in rows.x]
        if form.is_integer:
            emit.clear(blocks)
        weights = [emit.at(address, loop.index, form.block_bytes) for address in tiles.weights]
        ahead = _prefetch_distance(emit, form, tiles, loop.index, num_blocks)
        _write_block(emit, form, weights, ahead, x_rows, blocks)
        if form.is_integer:
            x_blocks = [emit.at(address, loop.index, X_BLOCK_BYTES) for address in rows.x_blocks]
            scales = [emit.at(address, loop.index, form.scale_bytes) for address in tiles.scales]
            _write_scales(emit, form, scales, x_blocks, blocks, sums)
    for address, row in zip(rows.out, sums, strict=True):
        for v, place in enumerate(row):
            emit.store(emit.builder.load(place), address, 4 * LANES * v)


def _tiles_at_once(form: Format, num_rows: int) -> int:
    """How many tiles of a pair the registers hold the sums of; integers have those of a block besides."""
    return 2 if num_rows <= _FEW_ROWS or (IS_WIDE and not form.is_integer) else 1


def _write_pair(
    emit: Emitter, form: Format, num_rows: int, weights: Any, stride: Any, scales: Any, x: Any, x_stride: Any,
    x_blocks: Any, blocks_stride: Any, out: Any, out_stride: Any, num_blocks: Any,
) -> None:  # fmt: skip
    """The product of a number of rows with both tiles, at once or one after the other."""
    builder, at_once = emit.builder, _tiles_at_once(form, num_rows)

    def every(base: Any, step: Any, indices: Iterable[Any]) -> list[Any]:
        return [builder.add(base, builder.mul(step, index)) for index in indices]

    scale_stride = builder.mul(num_blocks, constant(form.scale_bytes))
    row_indices = [constant(row) for row in range(num_rows)]
    with cgutils.for_range(builder, constant(2 // at_once)) as part:
        indices = [builder.add(part.index, constant(i)) for i in range(at_once)]
        tiles = _Tiles(every(weights, stride, indices), every(scales, scale_stride, indices), stride)
        out_part = emit.at(out, part.index, 4 * TILE)
        rows = _Rows(
            every(x, x_stride, row_indices),
            every(x_blocks, blocks_stride, row_indices),
            every(out_part, out_stride, row_indices),
        )
        _write_product(emit, form, tiles, rows, num_blocks)


def make_pair(form: Format) -> Any:
    """A numba intrinsic: the product of 1 to MAX_ROWS rows with two neighbouring tiles, 32 outputs.

    Its arguments are the number of rows, then addresses and byte strides: (rows, weights, tile_stride, scales, x,
    x_stride, x_blocks, x_blocks_stride, out, out_stride, num_blocks). A tile's weights are [block][step][output]; x is
    float32, or int16 for integer formats, where x_blocks holds scale and sum of each block of x, float32.
    """

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        num_rows, *places = args
        for count in range(1, MAX_ROWS + 1):
            with builder.if_then(builder.icmp_signed("==", num_rows, constant(count))):
                _write_pair(Emitter(builder), form, count, *places)
        return context.get_dummy_value()

    @intrinsic
    def pair(
        context: Any, rows: Any, weights: Any, tile_stride: Any, scales: Any, x: Any, x_stride: Any, x_blocks: Any,
        blocks_stride: Any, out: Any, out_stride: Any, num_blocks: Any,
    ) -> Any:  # fmt: skip
        return types.void(*[types.intp] * 11), write

    return pair
