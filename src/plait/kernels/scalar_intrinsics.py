"""Operations on single numbers that numba lacks, as LLVM instructions: bfloat16 as uint16, exp, order, barriers.

Loops over them are vectorised.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not know."""

    null = "0.0"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


I16, I32, I64, F32, BF16 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType(), _BFloat()


@functools.cache
def features() -> frozenset[str]:
    """The instructions that numba compiles for, which are a part of its cache's key: this CPU's, or those that
    NUMBA_CPU_FEATURES names."""
    named = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return frozenset(name[1:] for name in named.split(",") if name.startswith("+"))


def has_wide_registers() -> bool:
    """Whether a register has 64 bytes, and there are 32 (AVX-512); else a vector takes two of 16 (AVX2)."""
    return {"avx512f", "avx512vl", "avx512bw"} <= features()


def has_bfloat16() -> bool:
    """Whether there are instructions for bfloat16: products of pairs, rounding."""
    return has_wide_registers() and "avx512bf16" in features()


def supported() -> bool:
    """Whether this CPU runs what is by vectors."""
    return has_wide_registers() or {"avx2", "fma"} <= features()


def has_matrix_units() -> bool:
    """Whether this CPU has units for products of bfloat16 matrices (AMX)."""
    return has_bfloat16() and {"amx-tile", "amx-bf16"} <= features()


@functools.cache
def matrix_units() -> bool:
    """Whether it has them and this process may use them: Linux gives their registers to a process that asks."""
    if not has_matrix_units() or sys.platform != "linux":
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0


ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18
"""Number of the system call on Linux, x86-64."""


def is_bfloat16(like: Any) -> bool:
    """Whether a numba array type holds bfloat16."""
    return like.dtype == types.uint16


def integer(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


@intrinsic
def widen(typingctx, value):
    """float32 of a number of either dtype."""

    def codegen(context, builder, signature, args):
        if signature.args[0] == types.float32:
            return args[0]
        return builder.bitcast(builder.shl(builder.zext(args[0], I32), ir.Constant(I32, 16)), F32)

    return types.float32(value), codegen


@intrinsic
def narrow(typingctx, like, value):
    """A float32 rounded to the dtype of an array."""

    def codegen(context, builder, signature, args):
        if not is_bfloat16(signature.args[0]):
            return args[1]
        if has_bfloat16():
            return builder.bitcast(builder.fptrunc(args[1], BF16), I16)
        return rounded_bits(builder, args[1])

    return like.dtype(like, types.float32), codegen


def rounded_bits(builder: Any, value: Any) -> Any:
    """The bits of the nearest bfloat16, the even one of two, of a float32 or of each of a vector of 16; where there is
    no instruction for it."""
    wide = value.type != F32
    full, half = (ir.VectorType(I32, 16), ir.VectorType(I16, 16)) if wide else (I32, I16)

    def whole(number: int) -> Any:
        return ir.Constant(full, [number] * 16 if wide else number)

    bits = builder.bitcast(value, full)
    odd = builder.and_(builder.lshr(bits, whole(16)), whole(1))
    nearest = builder.add(bits, builder.add(odd, whole(0x7FFF)))
    quiet = builder.or_(bits, whole(0x00400000))
    nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.lshr(builder.select(nan, quiet, nearest), whole(16)), half)


@intrinsic
def ordered(typingctx, value):
    """An int32 for a float32, in the same order, one for both zeros; NaN is above or below all."""

    def codegen(context, builder, signature, args):
        return _in_order(builder, builder.bitcast(builder.fadd(args[0], ir.Constant(F32, 0.0)), I32))

    return types.int32(types.float32), codegen


@intrinsic
def of_ordered(typingctx, value):
    """The inverse of `ordered`; of its zero +0."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(_in_order(builder, args[0]), F32)

    return types.float32(types.int32), codegen


def _in_order(builder: Any, bits: Any) -> Any:
    sign = builder.ashr(bits, ir.Constant(I32, 31))
    return builder.xor(bits, builder.and_(sign, ir.Constant(I32, 0x7FFFFFFF)))


@intrinsic
def larger(typingctx, left, right):
    """The larger of two int32, or of two numbers that are `ordered`: a maximum that a vectoriser may reorder."""

    def codegen(context, builder, signature, args):
        return builder.select(builder.icmp_signed(">", *args), *args)

    return types.int32(types.int32, types.int32), codegen


_EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Coefficients of Cephes' expf (Moshier)."""


@intrinsic
def exp(typingctx, value):
    """e to a float32, to about one unit in the last place; 0 where the result would be denormal, NaN for NaN."""

    def codegen(context, builder, signature, args):
        return exponential(builder, args[0])

    return types.float32(types.float32), codegen


def exponential(builder: Any, x: Any) -> Any:
    """`exp` of a float32 or of each of a vector of 16.

    With n = round(x / log 2): e^x = 2^n · e^(x − n log 2). Adding 1.5 · 2^23 rounds, and leaves n in the lowest bits.
    """
    wide = x.type != F32
    bits = ir.VectorType(I32, 16) if wide else I32

    def number(value: float) -> Any:
        return ir.Constant(x.type, [value] * 16 if wide else value)

    def whole(value: int) -> Any:
        return ir.Constant(bits, [value] * 16 if wide else value)

    def fma(left: Any, right: Any, total: Any) -> Any:
        kind = ir.FunctionType(x.type, [x.type] * 3)
        name = "llvm.fma.v16f32" if wide else "llvm.fma.f32"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [left, right, total])

    shifted = fma(x, number(1.44269504088896341), number(12582912.0))
    n = builder.fsub(shifted, number(12582912.0))
    rest = fma(n, number(2.12194440e-4), fma(n, number(-0.693359375), x))
    poly = number(_EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        poly = fma(poly, rest, number(term))
    poly = builder.fadd(fma(poly, builder.fmul(rest, rest), rest), number(1.0))
    power = builder.shl(builder.add(builder.bitcast(shifted, bits), whole(127)), whole(23))
    out = builder.fmul(poly, builder.bitcast(power, x.type))
    out = builder.select(builder.fcmp_ordered("<", x, number(-87.0)), number(0.0), out)
    return builder.select(builder.fcmp_ordered(">", x, number(88.0)), number(float("inf")), out)


@intrinsic
def pointer(typingctx, address):
    """What numba.carray takes."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


SPINS = 2048
"""Looks at a barrier before the thread offers its core to others."""


@intrinsic
def barrier(typingctx, state, parts):
    """Wait until so many threads are here. `state`: address of two int64, 0 at first: how many wait, the round."""

    def codegen(context, builder, signature, args):
        state_at, num_parts = args
        count = builder.inttoptr(state_at, I64.as_pointer())
        turn = builder.inttoptr(builder.add(state_at, integer(8)), I64.as_pointer())
        entry = builder.block
        before = builder.load_atomic(turn, "acquire", 8)
        here = builder.add(builder.atomic_rmw("add", count, integer(1), "acq_rel"), integer(1))
        last, wait, offer, again, done = map(builder.append_basic_block, ("last", "wait", "offer", "again", "done"))
        builder.cbranch(builder.icmp_signed("==", here, num_parts), last, wait)
        builder.position_at_end(last)
        builder.store_atomic(integer(0), count, "monotonic", 8)
        builder.store_atomic(builder.add(before, integer(1)), turn, "release", 8)
        builder.branch(done)
        builder.position_at_end(wait)
        looks = builder.phi(I64)
        looks.add_incoming(integer(1), entry)
        builder.cbranch(builder.icmp_signed("==", builder.load_atomic(turn, "acquire", 8), before), again, done)
        builder.position_at_end(again)
        spun = builder.icmp_signed("==", builder.urem(looks, integer(SPINS)), integer(0))
        next_looks = builder.add(looks, integer(1))
        looks.add_incoming(next_looks, again)
        looks.add_incoming(next_looks, offer)
        builder.cbranch(spun, offer, wait)
        builder.position_at_end(offer)
        builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), "sched_yield"), [])
        builder.branch(wait)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen
