"""Writes LLVM vector code: loads, sums and products of vectors whose lanes do not meet."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, codegen, config


def _has_avx512() -> bool:
    """Whether numba compiles for AVX-512: NUMBA_CPU_FEATURES comes before what the processor has."""
    features: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]
    if features is None:
        features = codegen.get_host_cpu_features()  # type: ignore[no-untyped-call]
    return "+avx512f" in str(features).split(",")


IS_WIDE = _has_avx512()
"""Whether there are 32 registers of 16 floats, instead of 16 registers of 8 or less."""
LANES = 16 if IS_WIDE else 8

_FLOAT, _I8, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
FLOATS = ir.VectorType(_FLOAT, LANES)
HALVES = ir.VectorType(ir.HalfType(), LANES)
INTS = ir.VectorType(_I32, LANES)
# Two inputs for each output.
BYTE_PAIRS = ir.VectorType(_I8, 2 * LANES)
SHORT_PAIRS = ir.VectorType(ir.IntType(16), 2 * LANES)
INT_PAIRS = ir.VectorType(_I32, 2 * LANES)

Vectors = list[Any]


def constant(value: int) -> ir.Constant:
    """A number of 64 bits."""
    return ir.Constant(_I64, value)


class Emitter:
    """Writes instructions; addresses are plain integers."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def at(self, address: Any, index: Any, stride: int) -> Any:
        """The address of an element; `stride` in bytes."""
        return self.builder.add(address, self.builder.mul(index, constant(stride)))

    def load(self, address: Any, offset: int, kind: Any, align: int) -> Any:
        """A value of type `kind`, `offset` bytes behind an address that is a multiple of `align`."""
        place = self.builder.inttoptr(self.builder.add(address, constant(offset)), kind.as_pointer())
        value = self.builder.load(place)
        value.align = align
        return value

    def store(self, value: Any, address: Any, offset: int) -> None:
        """Write a vector of floats, `offset` bytes behind an address."""
        place = self.builder.inttoptr(self.builder.add(address, constant(offset)), FLOATS.as_pointer())
        self.builder.store(value, place).align = 4

    def halves(self, address: Any, offset: int) -> Any:
        """A vector of float16 in memory, as float32."""
        return self.builder.fpext(self.load(address, offset, HALVES, 2), FLOATS)

    def splat(self, address: Any, offset: int, kind: Any = FLOATS) -> Any:
        """One number in all lanes of a vector of `kind`."""
        undefined = ir.Constant(kind, ir.Undefined)
        one = self.load(address, offset, kind.element, 4)
        first = self.builder.insert_element(undefined, one, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * LANES))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, rounded once."""
        name = f"llvm.fma.v{LANES}f32"
        kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
        function = self.builder.module.globals.get(name) or ir.Function(self.builder.module, kind, name)
        return self.builder.call(function, [a, b, c])

    def prefetch(self, address: Any, offset: int) -> None:
        """Ask for the cache line at an address, which need not be readable."""
        pointer = _I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        name = "llvm.prefetch.p0"
        function = self.builder.module.globals.get(name) or ir.Function(self.builder.module, kind, name)
        place = self.builder.inttoptr(self.builder.add(address, constant(offset)), pointer)
        self.builder.call(function, [place, *(ir.Constant(_I32, value) for value in (0, 3, 1))])

    def variables(self, rows: int, vectors: int, kind: Any = FLOATS) -> list[Vectors]:
        """Running sums; LLVM keeps them in registers."""
        variable: Callable[[Any, Any], Any] = cgutils.alloca_once
        return [[variable(self.builder, kind) for _ in range(vectors)] for _ in range(rows)]

    def clear(self, sums: list[Vectors]) -> None:
        """Set running sums to 0."""
        for row in sums:
            for place in row:
                kind = place.type.pointee
                self.builder.store(ir.Constant(kind, [0] * LANES), place)

    def multiply(self, weights: Vectors, x_rows: list[Any], offset: int, sums: list[Vectors]) -> None:
        """sums += weights * x of one input."""
        for address, row in zip(x_rows, sums, strict=True):
            value = self.splat(address, offset)
            for weight, place in zip(weights, row, strict=True):
                self.builder.store(self.fma(weight, value, self.builder.load(place)), place)

    def multiply_pairs(self, weights: Vectors, x_rows: list[Any], offset: int, sums: list[Vectors]) -> None:
        """sums += codes * x of two inputs, all integers."""
        wide = [self.builder.sext(weight, INT_PAIRS) for weight in weights]
        for address, row in zip(x_rows, sums, strict=True):
            pair = self.builder.bitcast(self.splat(address, offset, INTS), SHORT_PAIRS)
            value = self.builder.sext(pair, INT_PAIRS)
            for weight, place in zip(wide, row, strict=True):
                both = self.builder.mul(weight, value)
                total = self.builder.add(self._every_second(both, 0), self._every_second(both, 1))
                self.builder.store(self.builder.add(self.builder.load(place), total), place)

    def _every_second(self, pairs: Any, first: int) -> Any:
        lanes = ir.Constant(INTS, list(range(first, 2 * LANES, 2)))
        return self.builder.shuffle_vector(pairs, ir.Constant(INT_PAIRS, ir.Undefined), lanes)
