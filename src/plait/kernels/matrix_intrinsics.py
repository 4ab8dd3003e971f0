"""Products by the CPU's matrix unit (AMX) in bfloat16; see `vector_intrinsics`.

The unit multiplies one tile of 16 rows of 32 numbers by one of 16 pairs of terms of 16 columns, and adds to a tile of
16 × 16 float32. Which part of its tiles counts is set by `use_unit`, until `leave_unit`. A row's sums do not depend on
the other rows of a tile, but are not those of vdpbf16ps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from plait.kernels.scalar_intrinsics import I32, I64, has_matrix_units, integer
from plait.kernels.vector_intrinsics import I8, V8H, V16F, V32B, Emit, stop

MATRIX_ROWS = 32
"""Most rows of a `matrix_tile`: two of the unit's tiles."""

MATRIX_TERMS = 16
"""Pairs of terms that the unit takes at a time."""

GROUP_ROWS = 256
"""Rows that pass a panel together: their sums, and of a part of their terms the rows themselves, stay in the caches."""

SUM_BYTES = 4 * MATRIX_ROWS * 32
"""Bytes of the float32 sums of a `matrix_tile`."""


def by_unit(emit: Callable[..., Any]) -> Callable[..., Any]:
    """The codegen of an intrinsic for bfloat16; it stops on a CPU without the unit.

    Code is kept for other processes: whether one may use the unit, it knows itself.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if has_matrix_units():
            emit(Emit(builder, True), *args)
        else:
            stop(builder)
        return context.get_dummy_value()

    return codegen


def instruct(emit: Emit, name: str, *tiles: int, address: Any = None, step: Any = None) -> None:
    """An instruction of the unit."""
    builder = emit.builder
    arguments = [ir.Constant(I8, tile) for tile in tiles]
    kinds: list[Any] = [I8] * len(tiles)
    if address is not None:
        arguments.append(builder.inttoptr(address, I8.as_pointer()))
        kinds.append(I8.as_pointer())
    if step is not None:
        arguments.append(integer(step) if isinstance(step, int) else step)
        kinds.append(I64)
    kind = ir.FunctionType(ir.VoidType(), kinds)
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), arguments)


def configure(emit: Emit, rows: Sequence[Any], widths: Sequence[int]) -> None:
    """Set the rows (int64 or I8 values) and the bytes of a row of the eight tiles."""
    builder = emit.builder
    at = builder.ptrtoint(cgutils.alloca_once(builder, ir.VectorType(I32, 16)), I64)
    emit.store(ir.Constant(ir.VectorType(I32, 16), [0] * 16), at)
    emit.store(ir.Constant(I8, 1), at)
    emit.store(ir.Constant(V8H, list(widths)), emit.at(at, 16))
    for tile, count in enumerate(rows):
        emit.store(
            ir.Constant(I8, count) if isinstance(count, int) else builder.trunc(count, I8), emit.at(at, 48 + tile)
        )
    instruct(emit, "ldtilecfg", address=at)


@intrinsic
def use_unit(typingctx, rows):
    """Make the unit ready for `matrix_tile` of so many rows: 1 … MATRIX_ROWS.

    Sums are in the tiles 0 to 3, rows of x in 4 and 5, weights in 6 and 7.
    """

    def body(emit, num_rows):
        builder = emit.builder
        many = builder.icmp_signed(">", num_rows, integer(16))
        first = builder.select(many, integer(16), num_rows)
        second = builder.select(many, builder.sub(num_rows, integer(16)), integer(1))
        configure(emit, (first, first, second, second, first, second, 16, 16), [64] * 8)

    return types.void(types.int64), by_unit(body)


@intrinsic
def leave_unit(typingctx):
    """The unit is not used for a while."""
    return types.void(), by_unit(lambda emit: instruct(emit, "tilerelease"))


@intrinsic
def sums_on_stack(typingctx):
    """Address of room for the sums of GROUP_ROWS rows, for as long as the caller runs."""

    def codegen(context, builder, signature, args):
        lines = SUM_BYTES // 64 * (GROUP_ROWS // MATRIX_ROWS)
        return builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(ir.VectorType(I32, 16), lines)), I64)

    return types.int64(), codegen


@intrinsic
def matrix_tile(typingctx, halves, begun, x, x_stride, weights, blocks, sums, ahead, ahead_lines):
    """sums [rows, 32] = (sums +) x [rows, K] · weights [K, 32], of the rows that `use_unit` was told.

    Args:
        halves: 1 for up to 16 rows, 2 for more.
        begun: 1 to go on with the sums, 0 to begin with 0.
        weights: of each pair of terms its 32 columns.
        blocks: K / 32.
        sums: float32.
        ahead: address of so many lines for each block (a multiple of 4) that are asked for meanwhile.
    """

    def body(emit, halves, begun, x_at, x_step, weights_at, num_blocks, sums_at, ahead_at, ahead_lines):
        builder = emit.builder

        def case(choice: int) -> None:
            both, go_on = divmod(choice, 2)
            tiles = [(half, column) for half in range(both) for column in range(2)]
            places = [emit.at(sums_at, 128 * 16 * half + 64 * column) for half, column in tiles]
            for (half, column), place in zip(tiles, places, strict=True):
                if go_on:
                    instruct(emit, "tileloadd64", 2 * half + column, address=place, step=128)
                else:
                    instruct(emit, "tilezero", 2 * half + column)

            def block(index: Any, totals: list[Any]) -> list[Any]:
                at = emit.at(weights_at, builder.mul(index, integer(128 * MATRIX_TERMS)))
                asked_at = emit.at(ahead_at, builder.mul(index, builder.mul(ahead_lines, integer(64))))

                def ask(line: Any, totals: list[Any]) -> list[Any]:
                    for near in range(4):
                        emit.prefetch(emit.at(asked_at, builder.mul(line, integer(64)), 64 * near))
                    return totals

                emit.loop(integer(0), ahead_lines, 4, [], ask)
                for half in range(both):
                    row_at = emit.at(x_at, builder.mul(x_step, integer(16 * half)), builder.mul(index, integer(64)))
                    instruct(emit, "tileloadd64", 4 + half, address=row_at, step=x_step)
                for column in range(2):
                    instruct(emit, "tileloadd64", 6 + column, address=emit.at(at, 64 * column), step=128)
                for half, column in tiles:
                    instruct(emit, "tdpbf16ps", 2 * half + column, 4 + half, 6 + column)
                return totals

            emit.loop(integer(0), num_blocks, 1, [], block)
            for (half, column), place in zip(tiles, places, strict=True):
                instruct(emit, "tilestored64", 2 * half + column, address=place, step=128)

        emit.cases(builder.add(builder.mul(halves, integer(2)), begun), (2, 3, 4, 5), case)

    return types.void(*[types.int64] * 9), by_unit(body)


@intrinsic
def rounded_rows(typingctx, rows, sums, bias, out, out_stride):
    """out [rows, 32] bfloat16 = sums [rows, 32] + bias [32], both float32."""

    def body(emit, num_rows, sums_at, bias_at, out_at, out_step):
        builder = emit.builder
        kind = ir.FunctionType(V32B, [V16F, V16F])
        rounded = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.cvtne2ps2bf16.512")
        biases = [emit.load(emit.at(bias_at, 64 * column), V16F) for column in range(2)]

        def row(index: Any, totals: list[Any]) -> list[Any]:
            at = emit.at(sums_at, builder.mul(index, integer(128)))
            low, high = (builder.fadd(emit.load(emit.at(at, 64 * column), V16F), biases[column]) for column in range(2))
            emit.store(builder.call(rounded, [high, low]), emit.at(out_at, builder.mul(out_step, index)))
            return totals

        emit.loop(integer(0), num_rows, 1, [], row)

    return types.void(*[types.int64] * 5), by_unit(body)
