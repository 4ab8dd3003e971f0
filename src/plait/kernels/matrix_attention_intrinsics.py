"""Scores and sums of weighted values by the CPU's matrix unit, for keys and values that were turned as it reads them.

Rows are those of query heads: of one token the heads that share a key head, or of several tokens one head each. See
`matrix_intrinsics`.

Shapes: C rows, up to 16; D, E head sizes of keys and of values.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from plait.kernels.attention_intrinsics import KEYS, two_keys, unmixed
from plait.kernels.matrix_intrinsics import by_unit, configure, instruct
from plait.kernels.scalar_intrinsics import I32, I64, integer
from plait.kernels.vector_intrinsics import V16F

ATTENDED_ROWS = 16
"""Most rows of a call."""


@intrinsic
def use_unit_for_attention(typingctx, rows):
    """Make the unit ready for `unit_scores` and `unit_weighted` of so many rows.

    Sums are in the tiles 0 to 3, queries in 4, shares of values in 5, keys in 6, values in 7.
    """

    def body(emit, rows):
        configure(emit, (rows, rows, rows, rows, rows, rows, 16, KEYS // 2), [64, 64, 64, 64, 64, 2 * KEYS, 64, 64])

    return types.void(types.int64), by_unit(body)


@intrinsic
def unit_scores(typingctx, query, query_step, turned, slices, blocks, out, out_step):
    """out [C, keys] float32 = query [C, D] · keysᵀ.

    Args:
        turned: address of the keys, block by block; of each the slices of 32 dims, 16 × 16 pairs transposed.
        slices: D / 32.
    """

    def body(emit, query_at, query_step, turned_at, num_slices, num_blocks, out_at, out_step):
        builder = emit.builder
        block_bytes = builder.mul(num_slices, integer(1024))

        def block(index: Any, totals: list[Any]) -> list[Any]:
            instruct(emit, "tilezero", 0)
            keys_at = emit.at(turned_at, builder.mul(index, block_bytes))

            def part(number: Any, totals: list[Any]) -> list[Any]:
                at = emit.at(query_at, builder.mul(number, integer(64)))
                instruct(emit, "tileloadd64", 4, address=at, step=query_step)
                at = emit.at(keys_at, builder.mul(number, integer(1024)))
                instruct(emit, "tileloadd64", 6, address=at, step=64)
                instruct(emit, "tdpbf16ps", 0, 4, 6)
                return totals

            emit.loop(integer(0), num_slices, 1, [], part)
            at = emit.at(out_at, builder.mul(index, integer(4 * KEYS)))
            instruct(emit, "tilestored64", 0, address=at, step=out_step)
            return totals

        emit.loop(integer(0), num_blocks, 1, [], block)

    return types.void(*[types.int64] * 7), by_unit(body)


@intrinsic
def turned_values(typingctx, values, row_bytes, vectors, out):
    """Lay 32 or 64 columns of the values of a block out as `unit_weighted` reads them: in pairs of keys.

    Args:
        vectors: columns / 16.
    """

    def body(emit, values_at, row_step, num_vectors, out_at):
        def case(count: int) -> None:
            for key in range(0, KEYS, 2):
                key_at = emit.at(values_at, emit.builder.mul(row_step, integer(key)))
                for number, operand in enumerate(two_keys(emit, key_at, row_step, count)):
                    emit.store(operand, emit.at(out_at, 32 * KEYS * number + 32 * key))

        emit.cases(num_vectors, (2, 4), case)

    return types.void(*[types.int64] * 4), by_unit(body)


@intrinsic
def unit_weighted(typingctx, rows, vectors, probs, probs_step, turned, blocks, out, out_step):
    """out [C, 32 or 64] bfloat16 = probs [C, keys] bfloat16 · values [keys, 32 or 64] as `turned_values` laid them out.

    Args:
        vectors: columns / 16.
    """

    def body(emit, num_rows, num_vectors, probs_at, probs_step, turned_at, num_blocks, out_at, out_step):
        builder = emit.builder
        room = cgutils.alloca_once(builder, ir.ArrayType(ir.VectorType(I32, 16), 4 * ATTENDED_ROWS))
        sums_at = builder.ptrtoint(room, I64)

        def case(count: int) -> None:
            for number in range(count):
                instruct(emit, "tilezero", number)

            def block(index: Any, totals: list[Any]) -> list[Any]:
                at = emit.at(probs_at, builder.mul(index, integer(2 * KEYS)))
                instruct(emit, "tileloadd64", 5, address=at, step=probs_step)
                values_at = emit.at(turned_at, builder.mul(index, integer(32 * KEYS * count)))
                for number in range(count):
                    instruct(emit, "tileloadd64", 7, address=emit.at(values_at, 32 * KEYS * number), step=64)
                    instruct(emit, "tdpbf16ps", number, 5, 7)
                return totals

            emit.loop(integer(0), num_blocks, 1, [], block)
            for number in range(count):
                instruct(emit, "tilestored64", number, address=emit.at(sums_at, 64 * number), step=256)

            def row(index: Any, totals: list[Any]) -> list[Any]:
                at = emit.at(sums_at, builder.mul(index, integer(256)))
                sums = [emit.load(emit.at(at, 64 * number), V16F) for number in range(count)]
                for number, total in enumerate(unmixed(emit, sums)):
                    emit.store_rounded(total, emit.at(out_at, builder.mul(index, out_step), 32 * number))
                return totals

            emit.loop(integer(0), num_rows, 1, [], row)

        emit.cases(num_vectors, (2, 4), case)

    return types.void(*[types.int64] * 8), by_unit(body)
