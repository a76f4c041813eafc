"""The inner loop of every product, written as LLVM vector code: x @ W.T for a few rows and 32 outputs.

The compiler's own vectoriser would sum along the inputs, so that a row's result could depend on how many rows are
computed with it. Here each of the 8 lanes of a vector belongs to one output and adds its products in the order of
the inputs: a row has the same bits alone and among others, which makes verification agree with plain decoding
exactly. LLVM lowers the vectors to whatever the processor has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8
TILE = 16
"""Outputs that are packed together: their weights for one input follow each other."""
PAIR = 2 * TILE
"""Outputs of two neighbouring tiles, the least that is computed at once."""
BLOCK = 32
"""Inputs that share one scale and one offset."""
MAX_ROWS = 6
"""More rows than this would not keep their sums in registers."""

_UNROLLED = 8
_PREFETCH_BYTES = 4096  # Measured: nearer ones arrive late, because a tile is read faster than memory answers.

_FLOAT, _I8, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FLOATS = ir.VectorType(_FLOAT, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_BYTES = ir.VectorType(_I8, LANES)
_INTS = ir.VectorType(_I32, LANES)

Vectors = list[Any]


def _constant(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


class _Emitter:
    """Writes the instructions of one tile; addresses are plain integers."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def add(self, address: Any, index: Any, stride: int) -> Any:
        return self.builder.add(address, self.builder.mul(index, _constant(stride)))

    def load(self, address: Any, offset: int, kind: Any, align: int) -> Any:
        place = self.builder.inttoptr(self.builder.add(address, _constant(offset)), kind.as_pointer())
        value = self.builder.load(place)
        value.align = align
        return value

    def store(self, value: Any, address: Any, offset: int) -> None:
        place = self.builder.inttoptr(self.builder.add(address, _constant(offset)), _FLOATS.as_pointer())
        self.builder.store(value, place).align = 4

    def halves(self, address: Any, offset: int) -> Any:
        return self.builder.fpext(self.load(address, offset, _HALVES, 2), _FLOATS)

    def splat(self, address: Any, offset: int) -> Any:
        undefined = ir.Constant(_FLOATS, ir.Undefined)
        one = self.builder.insert_element(undefined, self.load(address, offset, _FLOAT, 4), ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(one, undefined, ir.Constant(_INTS, [0] * LANES))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        name = f"llvm.fma.v{LANES}f32"
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        function = self.builder.module.globals.get(name) or ir.Function(self.builder.module, kind, name)
        return self.builder.call(function, [a, b, c])

    def prefetch(self, address: Any, offset: int) -> None:
        pointer = _I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        name = "llvm.prefetch.p0"
        function = self.builder.module.globals.get(name) or ir.Function(self.builder.module, kind, name)
        place = self.builder.inttoptr(self.builder.add(address, _constant(offset)), pointer)
        self.builder.call(function, [place, *(ir.Constant(_I32, value) for value in (0, 3, 1))])

    def variables(self, rows: int, vectors: int) -> list[Vectors]:
        """Running sums; LLVM keeps them in registers."""
        zero = ir.Constant(_FLOATS, [0.0] * LANES)
        variable: Callable[[Any, Any], Any] = cgutils.alloca_once_value
        return [[variable(self.builder, zero) for _ in range(vectors)] for _ in range(rows)]

    def clear(self, sums: list[Vectors]) -> None:
        for row in sums:
            for place in row:
                self.builder.store(ir.Constant(_FLOATS, [0.0] * LANES), place)

    def multiply(self, weights: Vectors, x_rows: list[Any], offset: int, sums: list[Vectors]) -> None:
        for address, row in zip(x_rows, sums, strict=True):
            value = self.splat(address, offset)
            for weight, place in zip(weights, row, strict=True):
                self.builder.store(self.fma(weight, value, self.builder.load(place)), place)


# -- formats: how the bytes of a tile become vectors ------------------------------------------------------------------


def _float_step(emit: _Emitter, address: Any, vectors: int) -> list[Vectors]:
    return [[emit.load(address, 4 * LANES * v, _FLOATS, 4) for v in range(vectors)]]


def _half_step(emit: _Emitter, address: Any, vectors: int) -> list[Vectors]:
    return [[emit.halves(address, 2 * LANES * v) for v in range(vectors)]]


def _int8_step(emit: _Emitter, address: Any, vectors: int) -> list[Vectors]:
    codes = [emit.load(address, LANES * v, _BYTES, 1) for v in range(vectors)]
    return [[emit.builder.sitofp(emit.builder.sext(code, _INTS), _FLOATS) for code in codes]]


def _int4_step(emit: _Emitter, address: Any, vectors: int) -> list[Vectors]:
    """Two inputs: the low half of each byte, then the high one."""
    builder = emit.builder
    codes = [builder.zext(emit.load(address, LANES * v, _BYTES, 1), _INTS) for v in range(vectors)]
    low = [builder.and_(code, ir.Constant(_INTS, [15] * LANES)) for code in codes]
    high = [builder.lshr(code, ir.Constant(_INTS, [4] * LANES)) for code in codes]
    return [[builder.sitofp(code, _FLOATS) for code in part] for part in (low, high)]


@dataclass(frozen=True, slots=True)
class Format:
    """How weights are stored. A step is what is decoded at once: `step_inputs` inputs in `step_bytes` bytes of a tile,
    `lane_bytes` for each output.

    has_scale: weight = scale * code, scales being float16 [block][output]; has_offset: + offset, [block][scale,
    offset][output].
    """

    decode: Callable[[_Emitter, Any, int], list[Vectors]]
    step_inputs: int
    lane_bytes: int
    has_scale: bool
    has_offset: bool

    @property
    def step_bytes(self) -> int:
        return self.lane_bytes * TILE

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of a tile."""
        return BLOCK // self.step_inputs * self.step_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales and offsets of one block of a tile."""
        return 2 * TILE * (self.has_scale + self.has_offset)


FORMATS = {
    "float": Format(_float_step, 1, 4, has_scale=False, has_offset=False),
    "half": Format(_half_step, 1, 2, has_scale=False, has_offset=False),
    "int8": Format(_int8_step, 1, 1, has_scale=True, has_offset=False),
    "int8_offset": Format(_int8_step, 1, 1, has_scale=True, has_offset=True),
    "int4_offset": Format(_int4_step, 2, 1, has_scale=True, has_offset=True),
}


@dataclass(frozen=True, slots=True)
class _Rows:
    """Addresses of the rows of a product: x, the sums of its blocks, and the result."""

    x: list[Any]
    sums: list[Any]
    out: list[Any]


def _write_block(emit: _Emitter, form: Format, tiles: list[Any], x_rows: list[Any], sums: list[Vectors]) -> None:
    """sums += codes * x for one block of each tile, given by its address."""
    loop_bytes = _UNROLLED * form.step_bytes
    with cgutils.for_range(emit.builder, _constant(BLOCK // form.step_inputs // _UNROLLED)) as loop:
        bases = [emit.add(tile, loop.index, loop_bytes) for tile in tiles]
        x_base = [emit.add(x, loop.index, 4 * _UNROLLED * form.step_inputs) for x in x_rows]
        for base in bases:
            for offset in range(0, loop_bytes, 64):
                emit.prefetch(base, _PREFETCH_BYTES + offset)
        for step in range(_UNROLLED):
            addresses = [emit.builder.add(base, _constant(step * form.step_bytes)) for base in bases]
            decoded = [form.decode(emit, address, TILE // LANES) for address in addresses]
            for part in range(form.step_inputs):
                weights = [vector for tile in decoded for vector in tile[part]]
                emit.multiply(weights, x_base, 4 * (step * form.step_inputs + part), sums)


def _write_scales(
    emit: _Emitter, form: Format, tiles: list[Any], block_sums: list[Any], blocks: list[Vectors], sums: list[Vectors]
) -> None:
    """sums += scale * block + offset * sum of x, once for each block; `tiles` are the addresses of their scales."""
    for v in range(len(sums[0])):
        address, lane = tiles[v * LANES // TILE], v * LANES % TILE
        scale = emit.halves(address, 2 * lane)
        offset = emit.halves(address, 2 * TILE + 2 * lane) if form.has_offset else None
        for row, place in enumerate(vectors[v] for vectors in sums):
            total = emit.fma(scale, emit.builder.load(blocks[row][v]), emit.builder.load(place))
            if offset is not None:
                total = emit.fma(offset, emit.splat(block_sums[row], 0), total)
            emit.builder.store(total, place)


def _write_product(
    emit: _Emitter, form: Format, weights: list[Any], scales: list[Any], rows: _Rows, num_blocks: Any
) -> None:
    """All blocks of one tile or of two for some rows."""
    vectors = len(weights) * TILE // LANES
    sums = emit.variables(len(rows.x), vectors)
    emit.clear(sums)
    blocks = emit.variables(len(rows.x), vectors) if form.has_scale else sums
    with cgutils.for_range(emit.builder, num_blocks) as loop:
        x_rows = [emit.add(address, loop.index, 4 * BLOCK) for address in rows.x]
        if form.has_scale:
            emit.clear(blocks)
        _write_block(emit, form, [emit.add(w, loop.index, form.block_bytes) for w in weights], x_rows, blocks)
        if form.has_scale:
            block_sums = [emit.add(address, loop.index, 4) for address in rows.sums]
            tiles = [emit.add(s, loop.index, form.scale_bytes) for s in scales]
            _write_scales(emit, form, tiles, block_sums, blocks, sums)
    for address, row in zip(rows.out, sums, strict=True):
        for v, place in enumerate(row):
            emit.store(emit.builder.load(place), address, 4 * LANES * v)


def make_pair(form: Format) -> Any:
    """A numba intrinsic: the product of 1 to 6 rows with two neighbouring tiles, 32 outputs.

    Its arguments are the number of rows, then addresses and byte strides: (rows, weights, tile_stride, scales, x,
    x_stride, sums_of_x, sums_stride, out, out_stride, num_blocks). A tile's weights are [block][input][output];
    sums_of_x holds the sum of each block of x; everything but weights and scales is float32.
    """

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        num_rows, weights, stride, scales, x, x_stride, sums, sums_stride, out, out_stride, num_blocks = args
        emit = _Emitter(builder)
        scale_stride = builder.mul(num_blocks, _constant(form.scale_bytes))
        for count in range(1, MAX_ROWS + 1):
            at_once = 2 if count <= 2 else 1  # Tiles; more would not keep their sums in registers.
            with (
                builder.if_then(builder.icmp_signed("==", num_rows, _constant(count))),
                cgutils.for_range(builder, _constant(2 // at_once)) as part,
            ):
                tiles, tile_scales = (
                    [
                        builder.add(base, builder.mul(step, builder.add(part.index, _constant(i))))
                        for i in range(at_once)
                    ]
                    for base, step in ((weights, stride), (scales, scale_stride))
                )
                places = ((x, x_stride), (sums, sums_stride), (emit.add(out, part.index, 4 * TILE), out_stride))
                rows = _Rows(
                    *(
                        [builder.add(base, builder.mul(step, _constant(r))) for r in range(count)]
                        for base, step in places
                    )
                )
                _write_product(emit, form, tiles, tile_scales, rows, num_blocks)
        return context.get_dummy_value()

    @intrinsic
    def pair(
        context: Any, rows: Any, weights: Any, tile_stride: Any, scales: Any, x: Any, x_stride: Any, sums_of_x: Any,
        sums_stride: Any, out: Any, out_stride: Any, num_blocks: Any,
    ) -> Any:  # fmt: skip
        return types.void(*[types.intp] * 11), write

    return pair
