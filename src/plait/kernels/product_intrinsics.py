"""A tile of a product by vectors, and the transposing that lays weights out for it; see `vector_intrinsics`.

Shapes: K terms of a product.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from plait.kernels.scalar_intrinsics import has_bfloat16, has_wide_registers, integer
from plait.kernels.vector_intrinsics import V16F, V16I, Emit, emitted, lane_pairs

TILE_ROWS = (14, 14 if has_bfloat16() else 12) if has_wide_registers() else (6, 4)
"""Most rows of a tile in float32 and in bfloat16. Of 32 registers two vectors of weights, the broadcasts and 28
accumulators take all, 24 where pairs are split; of 16, two for a vector, 12 and 8 for one column are left."""

TILE_COLUMNS = 32
"""Columns of a tile, two vectors."""

PREFETCH_BYTES = 8192
"""Weights are asked for so far ahead. [8, 576] by [576, 3072] in bfloat16: 119 µs without, 96 with."""


def _passes(rows: int) -> list[list[int]]:
    """Columns of a tile of so many rows, in vectors, that are summed at a time."""
    return [[0, 1]] if has_wide_registers() or rows <= 2 else [[0], [1]]


@intrinsic
def tile(typingctx, like, rows, x, x_stride, panel, terms, out, out_stride):
    """out [rows, 32] = x [rows, K] · panel [K, 32] + the panel's bias, rounded to the dtype.

    Args:
        rows: 1 … TILE_ROWS of the dtype.
        x, out: addresses; strides of their rows in bytes.
        panel: 32 float32 of bias, then for each term (pair of terms in bfloat16) its 32 columns.
        terms: K in float32, K / 2 in bfloat16.
    """

    def body(emit, num_rows, x_at, x_step, panel_at, num_terms, out_at, out_step):
        builder = emit.builder

        def case(count: int) -> None:
            row_ats = [emit.at(x_at, builder.mul(x_step, integer(row))) for row in range(count)]
            for columns in _passes(count):
                columns_of(row_ats, columns)

        def columns_of(row_ats: list[Any], columns: list[int]) -> None:
            biases = [emit.load(emit.at(panel_at, 64 * column), V16F, 64) for column in columns]
            weights_at = emit.at(panel_at, 128)

            def term(index: Any, totals: list[Any]) -> list[Any]:
                at = emit.at(weights_at, builder.mul(index, integer(128)))
                weights = [emit.operand(emit.at(at, 64 * column)) for column in columns]
                for column in columns:
                    emit.prefetch(emit.at(at, 64 * column + PREFETCH_BYTES))
                offset = builder.mul(index, integer(4))
                for row, row_at in enumerate(row_ats):
                    factor = emit.broadcast(emit.at(row_at, offset))
                    for number, weight in enumerate(weights):
                        place = len(weights) * row + number
                        totals[place] = emit.multiply_add(totals[place], weight, factor)
                return totals

            totals = iter(emit.loop(integer(0), num_terms, 1, biases * len(row_ats), term))
            for row in range(len(row_ats)):
                for column in columns:
                    offset = 16 * emit.element_bytes * column
                    emit.store_rounded(next(totals), emit.at(out_at, builder.mul(out_step, integer(row)), offset))

        emit.cases(num_rows, range(1, TILE_ROWS[emit.bfloat16] + 1), case)

    return types.void(like, *[types.int64] * 7), emitted(body)


@intrinsic
def transposed(typingctx, rows, row_bytes, out, out_row_bytes):
    """out [16, 16] = rows [16, 16] transposed, of four bytes each: in four rounds rows and columns swap a bit of their
    number.

    Args:
        rows, out: addresses; strides of their rows in bytes.
    """

    def codegen(context, builder, signature, args):
        emit = Emit(builder, False)
        rows_at, row_step, out_at, out_step = args
        vectors = [emit.load(emit.at(rows_at, builder.mul(row_step, integer(row))), V16I) for row in range(16)]
        for bit in (8, 4, 2, 1):
            low, high = lane_pairs(bit)
            for row in (row for row in range(16) if not row & bit):
                pair = vectors[row], vectors[row + bit]
                vectors[row], vectors[row + bit] = emit.shuffle(*pair, low), emit.shuffle(*pair, high)
        for row, vector in enumerate(vectors):
            emit.store(vector, emit.at(out_at, builder.mul(out_step, integer(row))))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen
