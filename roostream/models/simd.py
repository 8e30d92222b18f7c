"""SIMD for numba kernels: 16 numbers at a time, where loops are too short for automatic vectorization.

`load`, `store` and arithmetic. Each lane computes what it would compute alone, so results do not depend on
neighbors. LLVM maps the 16 lanes to one, two or four registers.

Letters: I, K, J rows, inner and columns of a product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model
from torch import Tensor

LANES = 16
COMPILED: bool = not config.DISABLE_JIT
"""False with NUMBA_DISABLE_JIT: the kernels are then unavailable, and callers use torch."""
_LOG2 = 0.6931471805599453
_LOG2_HIGH = 0.693145751953125  # few bits, so that n times it is exact in float32 too
_LOG2_LOW = _LOG2 - _LOG2_HIGH
_LEAST = -87.0  # its exponential is a normal float32

kernel: Callable[..., Any] = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
"""Compiles a function. `contract`: a product and a sum are rounded once; the order of sums stays as
written."""
short_kernel: Callable[..., Any] = njit(cache=True, error_model="numpy", fastmath={"contract"})
"""`kernel` for functions of microseconds: keeps the GIL, because releasing it would cost a thread switch."""


class Lanes(types.Type):  # type: ignore[misc]
    """Numba type of 16 numbers."""

    def __init__(self, dtype: types.Float) -> None:
        super().__init__(name=f"Lanes({dtype})")
        self.dtype = dtype

    @property
    def vector(self) -> ir.VectorType:
        return ir.VectorType(ir.FloatType() if self.dtype.bitwidth == 32 else ir.DoubleType(), LANES)

    @property
    def suffix(self) -> str:
        """For names of LLVM intrinsics."""
        return f"v{LANES}f{self.dtype.bitwidth}"


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, lanes: Lanes) -> None:
        super().__init__(manager, lanes, lanes.vector)


@intrinsic
def load(typing: Any, x: Any, i: Any, j: Any, count: Any, fill: Any) -> Any:
    """x[i, j : j + 16], of which only the first `count` exist; `fill` for the others. Columns of x are
    contiguous."""
    lanes = Lanes(x.dtype)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, row, column, number, other = args
        pointer = _pointer(context, builder, signature.args[0], (array, row, column))
        name, vector = f"llvm.masked.load.{lanes.suffix}.p0", lanes.vector
        arguments = [
            pointer,
            ir.IntType(32)(x.dtype.bitwidth // 8),
            _first(builder, number),
            _spread(builder, other, vector),
        ]
        return _call(builder, name, vector, arguments)

    return lanes(x, types.intp, types.intp, types.intp, x.dtype), generate


@intrinsic
def store(typing: Any, x: Any, i: Any, j: Any, count: Any, value: Any) -> Any:
    """x[i, j : j + 16] = value, for the first `count`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, row, column, number, stored = args
        pointer = _pointer(context, builder, signature.args[0], (array, row, column))
        arguments = [stored, pointer, ir.IntType(32)(x.dtype.bitwidth // 8), _first(builder, number)]
        _call(builder, f"llvm.masked.store.{value.suffix}.p0", ir.VoidType(), arguments)
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp, types.intp, value), generate


@intrinsic
def spread(typing: Any, like: Any, number: Any) -> Any:
    """The number in all lanes, with the type of the lanes `like`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _spread(builder, args[1], like.vector)

    return like(like, like.dtype), generate


@intrinsic
def fused(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once if the processor can."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, f"llvm.fmuladd.{a.suffix}", a.vector, list(args))

    return a(a, a, a), generate


@intrinsic
def larger(typing: Any, a: Any, b: Any) -> Any:
    """a where it is larger, else b: keeps NaN of b, not of a."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return a(a, a), generate


@intrinsic
def nearest(typing: Any, a: Any) -> Any:
    """Round to whole numbers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, f"llvm.rint.{a.suffix}", a.vector, list(args))

    return a(a), generate


@intrinsic
def power_of_two(typing: Any, a: Any) -> Any:
    """2^a for whole numbers whose result is a normal number: sets the exponent bits."""
    bits, exponent, bias = (32, 23, 127) if a.dtype.bitwidth == 32 else (64, 52, 1023)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        integers = ir.VectorType(ir.IntType(bits), LANES)
        biased = builder.add(builder.fptosi(args[0], integers), ir.Constant(integers, [bias] * LANES))
        return builder.bitcast(builder.shl(biased, ir.Constant(integers, [exponent] * LANES)), a.vector)

    return a(a), generate


@intrinsic
def total(typing: Any, a: Any) -> Any:
    """The sum of all lanes, in pairs."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = a.vector.element
        function = _function(builder, f"llvm.vector.reduce.fadd.{a.suffix}", number, [number, a.vector])
        return builder.call(function, [number(0.0), args[0]], fastmath=("reassoc",))

    return a.dtype(a), generate


@intrinsic
def largest(typing: Any, a: Any) -> Any:
    """The maximum of all lanes, ignoring NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, f"llvm.vector.reduce.fmax.{a.suffix}", a.vector.element, list(args))

    return a.dtype(a), generate


@kernel
def exponential(x: Any) -> Any:
    """e^x for lanes of x ≤ 0, clamped at -87: 2^n e^f with |f| ≤ log(2) / 2, and e^f by its series. Keeps
    NaN."""
    least = spread(x, _LEAST)
    n = nearest(fused(larger(x, least), spread(x, 1 / _LOG2), spread(x, 0.0)))
    f = larger(least, x)
    f = fused(n, spread(x, -_LOG2_LOW), fused(n, spread(x, -_LOG2_HIGH), f))
    y = spread(x, 1 / 6227020800)
    for reciprocal in (479001600, 39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1):
        y = fused(y, f, spread(x, 1 / reciprocal))
    return fused(y, power_of_two(n), spread(x, 0.0))


@kernel
def product(a_IK: np.ndarray, b_KJ: np.ndarray, out_IJ: np.ndarray) -> None:
    """out = a b; columns of b and out are contiguous. Sums run over k in order, so they do not depend on I
    and J."""
    rows, inner, columns = a_IK.shape[0], a_IK.shape[1], b_KJ.shape[1]
    for j in range(0, columns, LANES):
        left = columns - j
        i = 0
        while i + 4 <= rows:
            s0 = s1 = s2 = s3 = spread(load(out_IJ, i, j, 0, 0.0), 0.0)
            for k in range(inner):
                b = load(b_KJ, k, j, left, 0.0)
                s0 = fused(spread(b, a_IK[i, k]), b, s0)
                s1 = fused(spread(b, a_IK[i + 1, k]), b, s1)
                s2 = fused(spread(b, a_IK[i + 2, k]), b, s2)
                s3 = fused(spread(b, a_IK[i + 3, k]), b, s3)
            store(out_IJ, i, j, left, s0)
            store(out_IJ, i + 1, j, left, s1)
            store(out_IJ, i + 2, j, left, s2)
            store(out_IJ, i + 3, j, left, s3)
            i += 4
        while i < rows:
            s0 = spread(load(out_IJ, i, j, 0, 0.0), 0.0)
            for k in range(inner):
                b = load(b_KJ, k, j, left, 0.0)
                s0 = fused(spread(b, a_IK[i, k]), b, s0)
            store(out_IJ, i, j, left, s0)
            i += 1


def as_array(x: Tensor) -> np.ndarray:
    """The contiguous values of a CPU tensor, for a kernel; without a copy if it is contiguous."""
    array: np.ndarray = x.detach().contiguous().numpy()
    return array


def _pointer(context: Any, builder: Any, kind: Any, at: tuple[Any, Any, Any]) -> Any:
    """Address of x[i, j], as a byte pointer."""
    array, i, j = at
    x = context.make_array(kind)(context, builder, array)
    to_row, _ = cgutils.unpack_tuple(builder, x.strides, 2)
    size = kind.dtype.bitwidth // 8
    offset = builder.add(builder.mul(i, to_row), builder.mul(j, j.type(size)))
    return builder.gep(builder.bitcast(x.data, ir.IntType(8).as_pointer()), [offset])


def _first(builder: Any, count: Any) -> Any:
    """Mask of the first `count` lanes."""
    integers = ir.VectorType(count.type, LANES)
    return builder.icmp_signed(
        "<", ir.Constant(integers, list(range(LANES))), _spread(builder, count, integers)
    )


def _spread(builder: Any, number: Any, vector: ir.VectorType) -> Any:
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(
        first,
        ir.Constant(vector, ir.Undefined),
        ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES),
    )


def _call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    return builder.call(_function(builder, name, result, [x.type for x in arguments]), arguments)


def _function(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)
