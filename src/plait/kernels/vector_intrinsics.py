"""Instructions for CPUs with AVX2 or AVX-512, and AMX, where numba's own vectoriser does not find them: how they are
written.

The other `*_intrinsics` are functions made of them. Each is an *intrinsic*: called in a compiled function it stands for
the instructions that it emits. Addresses are int64. `like` is an array whose dtype says which variant is meant: uint16
stands for bfloat16, whose products of pairs are summed in float32 by one instruction (vdpbf16ps), float32 for itself.
A CPU without that instruction widens the numbers of a pair and sums one product after the other.

Every output is summed by one accumulator in the order of its terms, however many rows share the call: a row's result
is a function of that row alone, to the bit.

A vector holds 16 float32 or 16 pairs of bfloat16: one register with AVX-512, two with AVX2, which has half as many of
them. Functions take fewer vectors at a time there, and sum in the same order. The matrix unit has eight
registers, *tiles*, of 16 rows of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from plait.kernels.scalar_intrinsics import (
    BF16,
    F32,
    I16,
    I32,
    I64,
    has_bfloat16,
    integer,
    is_bfloat16,
    rounded_bits,
    supported,
)

I8 = ir.IntType(8)
V8H = ir.VectorType(I16, 8)
V16F, V16I, V16H, V32H, V16B, V32B = (
    ir.VectorType(F32, 16),
    ir.VectorType(I32, 16),
    ir.VectorType(I16, 16),
    ir.VectorType(I16, 32),
    ir.VectorType(BF16, 16),
    ir.VectorType(BF16, 32),
)
ZERO = ir.Constant(V16F, [0.0] * 16)

Operand = Any
"""A vector of a product: V16F; of pairs V32B, or their second and their first numbers, two V16F, where no instruction
takes pairs."""


def emitted(emit: Callable[..., None]) -> Callable[..., Any]:
    """The codegen of an intrinsic whose first argument is `like`; on a CPU without the instructions it stops."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bfloat16 = is_bfloat16(signature.args[0])
        if supported():
            emit(Emit(builder, bfloat16), *args[1:])
        else:
            stop(builder)
        return context.get_dummy_value()

    return codegen


def stop(builder: Any) -> None:
    builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.trap"), [])


class Emit:
    """Instructions at the builder's place, in terms of addresses and vectors."""

    def __init__(self, builder: Any, bfloat16: bool) -> None:
        self.builder, self.bfloat16 = builder, bfloat16
        self.element_bytes = 2 if bfloat16 else 4
        self.splits = bfloat16 and not has_bfloat16()
        """Whether pairs are taken apart to be multiplied."""

    def at(self, base: Any, *offsets: Any) -> Any:
        for offset in offsets:
            base = self.builder.add(base, integer(offset) if isinstance(offset, int) else offset)
        return base

    def load(self, address: Any, kind: Any, align: int = 1) -> Any:
        value = self.builder.load(self.builder.inttoptr(address, kind.as_pointer()))
        value.align = align
        return value

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer())).align = 1

    def prefetch(self, address: Any, locality: int = 3) -> None:
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        constants = [ir.Constant(I32, value) for value in (0, locality, 1)]
        self.builder.call(function, [self.builder.inttoptr(address, I8.as_pointer()), *constants])

    def shuffle(self, left: Any, right: Any, places: Sequence[int]) -> Any:
        return self.builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(I32, len(places)), list(places)))

    def splat(self, value: Any) -> Any:
        kind = ir.VectorType(value.type, 16)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
        return self.shuffle(first, ir.Constant(kind, ir.Undefined), [0] * 16)

    def operand(self, address: Any) -> Operand:
        """One vector of a product: 16 float32, or 16 pairs of bfloat16."""
        if self.splits:
            return self._split(self.load(address, V16I))
        return self.load(address, V32B if self.bfloat16 else V16F)

    def broadcast(self, address: Any) -> Operand:
        """The float32, or pair of bfloat16, at an address, in all places of an operand."""
        if self.splits:
            return self._split(self.splat(self.load(address, I32)))
        if self.bfloat16:
            return self.builder.bitcast(self.splat(self.load(address, I32)), V32B)
        return self.splat(self.load(address, F32))

    def _split(self, pairs: Any) -> Operand:
        builder = self.builder
        second = builder.and_(pairs, ir.Constant(V16I, [0xFFFF0000] * 16))
        first = builder.shl(pairs, ir.Constant(V16I, [16] * 16))
        return builder.bitcast(second, V16F), builder.bitcast(first, V16F)

    def multiply_add(self, total: Any, left: Operand, right: Operand) -> Any:
        if self.splits:
            for of_left, of_right in zip(left, right, strict=True):
                total = self._fma(total, of_left, of_right)
            return total
        if not self.bfloat16:
            return self._fma(total, left, right)
        kind = ir.FunctionType(V16F, [V16F, V32B, V32B])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        return self.builder.call(function, [total, left, right])

    def _fma(self, total: Any, left: Any, right: Any) -> Any:
        kind = ir.FunctionType(V16F, [V16F, V16F, V16F])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.fma.v16f32")
        return self.builder.call(function, [left, right, total])

    def store_rounded(self, value: Any, address: Any) -> None:
        """16 float32 in the dtype of the variant."""
        self.store(narrowed(self, value) if self.bfloat16 else value, address)

    def loop(self, start: Any, stop: Any, step: int, totals: list[Any], body: Callable[[Any, list[Any]], list[Any]]):
        """`totals` after body(index, totals) for index in range(start, stop, step)."""
        builder = self.builder
        entry = builder.block
        head, inside, done = (builder.append_basic_block(name) for name in ("head", "inside", "done"))
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(I64)
        index.add_incoming(start, entry)
        phis = []
        for total in totals:
            phi = builder.phi(total.type)
            phi.add_incoming(total, entry)
            phis.append(phi)
        builder.cbranch(builder.icmp_signed("<", index, stop), inside, done)
        builder.position_at_end(inside)
        after = body(index, list(phis))
        index.add_incoming(builder.add(index, integer(step)), builder.block)
        for phi, total in zip(phis, after, strict=True):
            phi.add_incoming(total, builder.block)
        builder.branch(head)
        builder.position_at_end(done)
        return phis

    def cases(self, value: Any, choices: Sequence[int], emit: Callable[[int], None]) -> None:
        """The instructions emit(choice) where value is that choice; nothing where it is none of them."""
        builder = self.builder
        done = builder.append_basic_block("end")
        switch = builder.switch(value, done)
        for choice in choices:
            block = builder.append_basic_block(f"case{choice}")
            switch.add_case(integer(choice), block)
            builder.position_at_end(block)
            emit(choice)
            builder.branch(done)
        builder.position_at_end(done)


def widened(emit: Emit, address: Any) -> Any:
    """16 numbers of the variant's dtype as float32."""
    if not emit.bfloat16:
        return emit.load(address, V16F)
    return of_bits(emit, emit.load(address, V16H))


def of_bits(emit: Emit, bits: Any) -> Any:
    """16 bfloat16 as float32."""
    wide = emit.builder.zext(bits, V16I)
    return emit.builder.bitcast(emit.builder.shl(wide, ir.Constant(V16I, [16] * 16)), V16F)


def narrowed(emit: Emit, value: Any) -> Any:
    """16 float32 as bfloat16, or as their bits."""
    return rounded_bits(emit.builder, value) if emit.splits else emit.builder.fptrunc(value, V16B)


def lane_halves(width: int) -> tuple[list[int], list[int]]:
    """The even and the odd runs of `width` lanes of two vectors: those of the first, then those of the second."""
    even = [lane for lane in range(32) if lane // width % 2 == 0]
    return even, [lane + width for lane in even]


def lane_pairs(width: int) -> tuple[list[int], list[int]]:
    """The same in another order: a run of the first, then the one of the second in its place. One instruction."""
    even = [lane for lane in range(16) if lane // width % 2 == 0]
    runs = [even[start : start + width] for start in range(0, len(even), width)]
    lanes = [lane for run in runs for lane in (*run, *(other + 16 for other in run))]
    return lanes, [lane + width for lane in lanes]
