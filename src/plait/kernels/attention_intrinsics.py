"""Scores of a block of keys and sums of weighted values by vectors; see `vector_intrinsics`."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from plait.kernels.scalar_intrinsics import I32, I64, has_wide_registers, integer
from plait.kernels.vector_intrinsics import V32B, V32H, ZERO, Emit, Operand, emitted, lane_halves, lane_pairs, widened

WEIGHTED_ROWS = 4
"""Most rows of one `weighted` call."""

WEIGHTED_COLUMNS = (64, 32) if has_wide_registers() else (16, 16)
"""Columns of a `weighted` call, and where the values have no multiple of so many."""

_SCORED_KEYS = 16 if has_wide_registers() else 4
"""Keys whose scores are summed at a time."""

KEYS = 16
"""Tokens of a block of the pool, as `scores` and `weighted` read it."""


def _summed(emit: Emit, vectors: list[Any]) -> Any:
    """The vector of the sums of 16 vectors: four rounds, each halves the vectors and the lanes that one has."""
    rounds = (lane_halves(8), lane_halves(4), lane_pairs(2), lane_pairs(1))
    owners = [[number] * 16 for number in range(16)]  # which vector's terms each lane holds
    for first, second in rounds:
        half = len(vectors) // 2
        pairs = list(zip(range(half), range(half, 2 * half), strict=True))
        vectors = [
            emit.builder.fadd(emit.shuffle(vectors[i], vectors[j], first), emit.shuffle(vectors[i], vectors[j], second))
            for i, j in pairs
        ]
        both = [owners[i] + owners[j] for i, j in pairs]
        assert all([of[p] for p in first] == [of[p] for p in second] for of in both), "lanes of two vectors are mixed"
        owners = [[of[p] for p in first] for of in both]
    return emit.shuffle(vectors[0], vectors[0], [owners[0].index(number) for number in range(16)])


@intrinsic
def scores(typingctx, like, query, keys, size, scale, out):
    """out [16] float32 = scale · keys [16, size] · query [size], all adjacent.

    Args:
        size: a multiple of 32 (bfloat16) or 16.
    """

    def body(emit, query_at, keys_at, num_elements, factor, out_at):
        builder = emit.builder
        width = builder.mul(num_elements, integer(emit.element_bytes))
        key_ats = [emit.at(keys_at, builder.mul(width, integer(key))) for key in range(KEYS)]

        def scored(key_ats: list[Any]) -> list[Any]:
            def part(index: Any, totals: list[Any]) -> list[Any]:
                query_part = emit.operand(emit.at(query_at, index))
                return [
                    emit.multiply_add(total, query_part, emit.operand(emit.at(key_at, index)))
                    for total, key_at in zip(totals, key_ats, strict=True)
                ]

            return emit.loop(integer(0), width, 64, [ZERO] * len(key_ats), part)

        totals: list[Any] = []
        for first in range(0, KEYS, _SCORED_KEYS):
            totals += scored(key_ats[first : first + _SCORED_KEYS])
        emit.store(builder.fmul(_summed(emit, totals), emit.splat(factor)), out_at)

    return types.void(like, *[types.int64] * 3, types.float32, types.int64), emitted(body)


_LOW = [8 * lane + place for lane in range(4) for place in (0, 32, 1, 33, 2, 34, 3, 35)]
_HIGH = [place + 4 for place in _LOW]


def two_keys(emit: Emit, value_at: Any, row_bytes: Any, num_vectors: int) -> list[Operand]:
    """Operands whose pairs are the values of two adjacent keys; 32 columns make two, in the order of `unmixed`."""
    if emit.splits:
        ats = [emit.at(value_at, 32 * number) for number in range(num_vectors)]
        return [(widened(emit, emit.at(at, row_bytes)), widened(emit, at)) for at in ats]
    operands = []
    for at in range(0, num_vectors * 32, 64):
        first = emit.load(emit.at(value_at, at), V32H)
        second = emit.load(emit.at(value_at, row_bytes, at), V32H)
        for places in (_LOW, _HIGH):
            operands.append(emit.builder.bitcast(emit.shuffle(first, second, places), V32B))
    return operands


def unmixed(emit: Emit, totals: list[Any]) -> list[Any]:
    """The 16-column vectors of the totals of `two_keys`, in their order."""
    if emit.splits:
        return totals
    lanes = [*range(4), *range(16, 20), *range(4, 8), *range(20, 24)]
    out = []
    for low, high in zip(totals[::2], totals[1::2], strict=True):
        out += [emit.shuffle(low, high, lanes), emit.shuffle(low, high, [lane + 8 for lane in lanes])]
    return out


@intrinsic
def weighted(
    typingctx,
    like,
    rows,
    columns,
    probs,
    probs_step,
    table,
    first,
    stop,
    next_table,
    values,
    next_values,
    block_bytes,
    row_bytes,
    out,
    step,
):
    """out [rows, columns] = probs [rows, keys] · values [keys, columns], the keys in the blocks of a table.

    Args:
        rows: 1 … WEIGHTED_ROWS. columns: of WEIGHTED_COLUMNS.
        next_table, next_values: what the next call will read, asked for meanwhile.
        probs: of the first key of the first block. probs, table, values and out are addresses; steps in bytes.
        table: address of the block ids (int32); those of number first … stop − 1 are read.
        values: of the first column in block 0; a block and a key (`row_bytes`) further on come the next.
    """

    def body(emit, num_rows, num_columns, probs_at, probs_step, table_at, low, high, next_table_at, *rest):
        values_at, next_values_at, block_step, row_step, out_at, out_step = rest
        builder = emit.builder
        bfloat16, element_bytes = emit.bfloat16, emit.element_bytes

        def case(choice: int) -> None:
            count, num_vectors = choice // 10, choice % 10

            def block(index: Any, totals: list[Any]) -> list[Any]:
                block_id = builder.sext(emit.load(emit.at(table_at, builder.mul(index, integer(4))), I32), I64)
                block_at = emit.at(values_at, builder.mul(block_id, block_step))
                next_id = builder.sext(emit.load(emit.at(next_table_at, builder.mul(index, integer(4))), I32), I64)
                next_at = emit.at(next_values_at, builder.mul(next_id, block_step))
                done = builder.mul(builder.sub(index, low), integer(KEYS * element_bytes))
                for key in range(0, KEYS, 2 if bfloat16 else 1):
                    key_at = emit.at(block_at, builder.mul(row_step, integer(key)))
                    for near in range(2 if bfloat16 else 1):
                        next_key_at = emit.at(next_at, builder.mul(row_step, integer(key + near)))
                        for line in range(0, num_vectors * 16 * element_bytes, 64):
                            emit.prefetch(emit.at(next_key_at, line), 2)
                    if bfloat16:
                        operands = two_keys(emit, key_at, row_step, num_vectors)
                    else:
                        operands = [emit.operand(emit.at(key_at, 64 * number)) for number in range(num_vectors)]
                    for row in range(count):
                        row_at = emit.at(probs_at, builder.mul(probs_step, integer(row)), done, key * element_bytes)
                        factor = emit.broadcast(row_at)
                        for number, operand in enumerate(operands):
                            place = row * num_vectors + number
                            totals[place] = emit.multiply_add(totals[place], operand, factor)
                return totals

            totals = emit.loop(low, high, 1, [ZERO] * (count * num_vectors), block)
            for row in range(count):
                of_row = totals[row * num_vectors : (row + 1) * num_vectors]
                for number, total in enumerate(unmixed(emit, of_row) if bfloat16 else of_row):
                    at = emit.at(out_at, builder.mul(out_step, integer(row)), 16 * element_bytes * number)
                    emit.store_rounded(total, at)

        wanted = builder.add(builder.mul(num_rows, integer(10)), builder.sdiv(num_columns, integer(16)))
        widths = sorted({columns // 16 for columns in WEIGHTED_COLUMNS})
        choices = [10 * count + vectors for count in range(1, WEIGHTED_ROWS + 1) for vectors in widths]
        emit.cases(wanted, choices, case)

    return types.void(like, *[types.int64] * 14), emitted(body)


@intrinsic
def ask(typingctx, address, lines):
    """Have so many lines of the cache from an address on brought to the second level."""

    def codegen(context, builder, signature, args):
        emit = Emit(builder, False)
        first, count = args

        def line(index: Any, totals: list[Any]) -> list[Any]:
            emit.prefetch(emit.at(first, builder.mul(index, integer(64))), 2)
            return totals

        emit.loop(integer(0), count, 1, [], line)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen
