"""Inner loops written as LLVM instructions, for CPUs with AVX-512: what numba's own vectoriser cannot find.

Each function here is an *intrinsic*: called in a compiled function it stands for the instructions that it emits.
Addresses are int64. `like` is an array whose dtype says which variant is meant: uint16 stands for bfloat16, whose
products of pairs are summed in float32 by one instruction (vdpbf16ps), float32 for itself.

Every output is summed by one accumulator in the order of its terms, however many rows share the call: a row's result
is a function of that row alone, to the bit.

Shapes: MR rows of a tile, K terms of a product, a vector holds 16 float32 or 16 pairs of bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from plait.models.scalar_code import BF16, F32, I16, I32, I64, has_matrix_units, integer, is_bfloat16, supported

TILE_ROWS = 14
"""Most rows of a tile: 28 accumulators, two vectors of weights and the broadcasts fill the 32 registers."""

TILE_COLUMNS = 32
"""Columns of a tile, two vectors."""

PREFETCH_BYTES = 8192
"""Weights are asked for so far ahead. [8, 576] by [576, 3072] in bfloat16: 119 µs without, 96 with."""

WEIGHTED_ROWS = 4
"""Most rows of one `weighted` call."""

KEYS = 16
"""Tokens of a block of the pool, as `scores` and `weighted` read it."""


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


def _emitted(emit: Callable[..., None]) -> Callable[..., Any]:
    """The codegen of an intrinsic whose first argument is `like`; on a CPU without the instructions it stops."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bfloat16 = is_bfloat16(signature.args[0])
        if supported()[bfloat16]:
            emit(_Emit(builder, bfloat16), *args[1:])
        else:
            _stop(builder)
        return context.get_dummy_value()

    return codegen


def _stop(builder: Any) -> None:
    builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.trap"), [])


class _Emit:
    """Instructions at the builder's place, in terms of addresses and vectors."""

    def __init__(self, builder: Any, bfloat16: bool) -> None:
        self.builder, self.bfloat16 = builder, bfloat16
        self.element_bytes = 2 if bfloat16 else 4

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
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
        return self.shuffle(one, ir.Constant(kind, ir.Undefined), [0] * 16)

    def operand(self, address: Any) -> Any:
        """One vector of a product: 16 float32, or 16 pairs of bfloat16."""
        return self.load(address, V32B if self.bfloat16 else V16F)

    def broadcast(self, address: Any) -> Any:
        """The float32, or pair of bfloat16, at an address, in all places of an operand."""
        if self.bfloat16:
            return self.builder.bitcast(self.splat(self.load(address, I32)), V32B)
        return self.splat(self.load(address, F32))

    def multiply_add(self, total: Any, left: Any, right: Any) -> Any:
        if self.bfloat16:
            kind, name = ir.FunctionType(V16F, [V16F, V32B, V32B]), "llvm.x86.avx512bf16.dpbf16ps.512"
            operands = [total, left, right]
        else:
            kind, name = ir.FunctionType(V16F, [V16F, V16F, V16F]), "llvm.fma.v16f32"
            operands = [left, right, total]
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), operands)

    def store_rounded(self, value: Any, address: Any) -> None:
        """16 float32 in the dtype of the variant."""
        self.store(self.builder.fptrunc(value, V16B) if self.bfloat16 else value, address)

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


@intrinsic
def tile(typingctx, like, rows, x, x_stride, panel, terms, out, out_stride):
    """out [rows, 32] = x [rows, K] · panel [K, 32] + the panel's bias, rounded to the dtype.

    Args:
        rows: 1 … TILE_ROWS.
        x, out: addresses; strides of their rows in bytes.
        panel: 32 float32 of bias, then for each term (pair of terms in bfloat16) its 32 columns.
        terms: K in float32, K / 2 in bfloat16.
    """

    def body(emit, num_rows, x_at, x_step, panel_at, num_terms, out_at, out_step):
        builder = emit.builder

        def case(count: int) -> None:
            row_ats = [emit.at(x_at, builder.mul(x_step, integer(row))) for row in range(count)]
            biases = [emit.load(emit.at(panel_at, 64 * column), V16F, 64) for column in range(2)]
            weights_at = emit.at(panel_at, 128)

            def term(index: Any, totals: list[Any]) -> list[Any]:
                at = emit.at(weights_at, builder.mul(index, integer(128)))
                columns = [emit.operand(emit.at(at, 64 * column)) for column in range(2)]
                for column in range(2):
                    emit.prefetch(emit.at(at, 64 * column + PREFETCH_BYTES))
                offset = builder.mul(index, integer(4))
                for row, row_at in enumerate(row_ats):
                    factor = emit.broadcast(emit.at(row_at, offset))
                    for column in range(2):
                        place = 2 * row + column
                        totals[place] = emit.multiply_add(totals[place], columns[column], factor)
                return totals

            totals = emit.loop(integer(0), num_terms, 1, biases * count, term)
            for row in range(count):
                for column in range(2):
                    offset = 16 * emit.element_bytes * column
                    emit.store_rounded(
                        totals[2 * row + column], emit.at(out_at, builder.mul(out_step, integer(row)), offset)
                    )

        emit.cases(num_rows, range(1, TILE_ROWS + 1), case)

    return types.void(like, *[types.int64] * 7), _emitted(body)


MATRIX_ROWS = 32
"""Rows of a `matrix_tile`: two of the unit's registers of 16 rows."""

MATRIX_TERMS = 16
"""Pairs of terms that the unit takes at a time."""


@intrinsic
def matrix_tile(typingctx, rows, x, x_stride, panel, terms, out, out_stride):
    """`tile` in bfloat16 by the CPU's matrix unit: the panel is laid out as it reads it.

    A row's sums do not depend on the other rows either, but are not those of `tile`.

    Args:
        rows: 1 … MATRIX_ROWS.
        terms: a multiple of MATRIX_TERMS.
    """

    def codegen(context, builder, signature, args):
        if not has_matrix_units():  # code is kept for other processes: whether one may use them, it knows itself
            _stop(builder)
            return context.get_dummy_value()
        emit = _Emit(builder, True)
        num_rows, x_at, x_step, panel_at, num_terms, out_at, out_step = args
        config_at, sums_at = (
            builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(ir.VectorType(I32, 16), size)), I64)
            for size in (1, 2 * MATRIX_ROWS)
        )
        _configure(emit, config_at, num_rows)

        def case(halves: int) -> None:
            sums = [(half, column) for half in range(halves) for column in range(2)]
            for half, column in sums:
                _unit(emit, "tilezero", 2 * half + column)

            def block(index: Any, totals: list[Any]) -> list[Any]:
                at = emit.at(panel_at, 128, builder.mul(index, integer(128)))
                for line in range(0, 128 * MATRIX_TERMS, 64):
                    emit.prefetch(emit.at(at, line + PREFETCH_BYTES))
                for half in range(halves):
                    row_at = emit.at(x_at, builder.mul(x_step, integer(16 * half)), builder.mul(index, integer(4)))
                    _unit(emit, "tileloadd64", 4 + half, address=row_at, step=x_step)
                for column in range(2):
                    _unit(emit, "tileloadd64", 6 + column, address=emit.at(at, 64 * column), step=integer(128))
                for half, column in sums:
                    _unit(emit, "tdpbf16ps", 2 * half + column, 4 + half, 6 + column)
                return totals

            emit.loop(integer(0), num_terms, MATRIX_TERMS, [], block)
            for half, column in sums:
                at = emit.at(sums_at, 128 * 16 * half + 64 * column)
                _unit(emit, "tilestored64", 2 * half + column, address=at, step=integer(128))

        two = builder.zext(builder.icmp_signed(">", num_rows, integer(16)), I64)
        emit.cases(two, (0, 1), lambda choice: case(1 + choice))
        _unit(emit, "tilerelease")

        def row(index: Any, totals: list[Any]) -> list[Any]:
            for column in range(2):
                total = emit.load(emit.at(sums_at, builder.mul(index, integer(128)), 64 * column), V16F)
                bias = emit.load(emit.at(panel_at, 64 * column), V16F)
                at = emit.at(out_at, builder.mul(out_step, index), 32 * column)
                emit.store_rounded(builder.fadd(total, bias), at)
            return totals

        emit.loop(integer(0), num_rows, 1, [], row)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), codegen


def _configure(emit: _Emit, config_at: Any, num_rows: Any) -> None:
    """Sums in registers 0 to 3, rows of x in 4 and 5, weights in 6 and 7; all rows of a register have 64 bytes."""
    builder = emit.builder
    emit.store(ir.Constant(ir.VectorType(I32, 16), [0] * 16), config_at)
    emit.store(ir.Constant(I8, 1), config_at)
    emit.store(ir.Constant(V8H, [64] * 8), emit.at(config_at, 16))
    many = builder.icmp_signed(">", num_rows, integer(16))
    first = builder.trunc(builder.select(many, integer(16), num_rows), I8)
    second = builder.trunc(builder.select(many, builder.sub(num_rows, integer(16)), integer(1)), I8)
    for register, count in enumerate((first, first, second, second, first, second, *[ir.Constant(I8, 16)] * 2)):
        emit.store(count, emit.at(config_at, 48 + register))
    _unit(emit, "ldtilecfg", address=config_at)


def _unit(emit: _Emit, name: str, *registers: int, address: Any = None, step: Any = None) -> None:
    """An instruction of the matrix unit."""
    builder = emit.builder
    arguments = [ir.Constant(I8, register) for register in registers]
    kinds: list[Any] = [I8] * len(registers)
    if address is not None:
        arguments.append(builder.inttoptr(address, I8.as_pointer()))
        kinds.append(I8.as_pointer())
    if step is not None:
        arguments.append(step)
        kinds.append(I64)
    kind = ir.FunctionType(ir.VoidType(), kinds)
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), arguments)


def _halves(width: int) -> tuple[list[int], list[int]]:
    """Of two vectors the even and the odd runs of `width` lanes: those of the first, then those of the second."""
    even = [lane for lane in range(32) if lane // width % 2 == 0]
    return even, [lane + width for lane in even]


def _pairs(width: int) -> tuple[list[int], list[int]]:
    """The same in another order: a run of the first, then the one of the second in its place. One instruction."""
    even = [lane for lane in range(16) if lane // width % 2 == 0]
    runs = [even[start : start + width] for start in range(0, len(even), width)]
    lanes = [lane for run in runs for lane in (*run, *(other + 16 for other in run))]
    return lanes, [lane + width for lane in lanes]


def _summed(emit: _Emit, vectors: list[Any]) -> Any:
    """Of 16 vectors the vector of their sums: four rounds, each halves the vectors and the lanes that one has."""
    rounds = (_halves(8), _halves(4), _pairs(2), _pairs(1))
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

        def part(index: Any, totals: list[Any]) -> list[Any]:
            query_part = emit.operand(emit.at(query_at, index))
            return [
                emit.multiply_add(total, query_part, emit.operand(emit.at(key_at, index)))
                for total, key_at in zip(totals, key_ats, strict=True)
            ]

        totals = emit.loop(integer(0), width, 64, [ZERO] * KEYS, part)
        emit.store(builder.fmul(_summed(emit, totals), emit.splat(factor)), out_at)

    return types.void(like, *[types.int64] * 3, types.float32, types.int64), _emitted(body)


_LOW = [8 * lane + place for lane in range(4) for place in (0, 32, 1, 33, 2, 34, 3, 35)]
_HIGH = [place + 4 for place in _LOW]


def _two_keys(emit: _Emit, value_at: Any, row_bytes: Any, num_vectors: int) -> list[Any]:
    """Operands whose pairs are the values of two adjacent keys; 32 columns make two, in the order of `_unmixed`."""
    operands = []
    for at in range(0, num_vectors * 32, 64):
        first = emit.load(emit.at(value_at, at), V32H)
        second = emit.load(emit.at(value_at, row_bytes, at), V32H)
        for places in (_LOW, _HIGH):
            operands.append(emit.builder.bitcast(emit.shuffle(first, second, places), V32B))
    return operands


def _unmixed(emit: _Emit, totals: list[Any]) -> list[Any]:
    """The 16-column vectors of the totals of `_two_keys`, in their order."""
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
        rows: 1 … WEIGHTED_ROWS. columns: 32 or 64.
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
                        operands = _two_keys(emit, key_at, row_step, num_vectors)
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
                for number, total in enumerate(_unmixed(emit, of_row) if bfloat16 else of_row):
                    at = emit.at(out_at, builder.mul(out_step, integer(row)), 16 * element_bytes * number)
                    emit.store_rounded(total, at)

        wanted = builder.add(builder.mul(num_rows, integer(10)), builder.sdiv(num_columns, integer(16)))
        choices = [10 * count + vectors for count in range(1, WEIGHTED_ROWS + 1) for vectors in (2, 4)]
        emit.cases(wanted, choices, case)

    return types.void(like, *[types.int64] * 14), _emitted(body)


@intrinsic
def ask(typingctx, address, lines):
    """Have so many lines of the cache from an address on brought to the second level."""

    def codegen(context, builder, signature, args):
        emit = _Emit(builder, False)
        first, count = args

        def line(index: Any, totals: list[Any]) -> list[Any]:
            emit.prefetch(emit.at(first, builder.mul(index, integer(64))), 2)
            return totals

        emit.loop(integer(0), count, 1, [], line)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def transposed(typingctx, rows, row_bytes, out, out_row_bytes):
    """out [16, 16] = rows [16, 16] transposed, of four bytes each: in four rounds rows and columns swap a bit of their
    number.

    Args:
        rows, out: addresses; strides of their rows in bytes.
    """

    def codegen(context, builder, signature, args):
        emit = _Emit(builder, False)
        rows_at, row_step, out_at, out_step = args
        vectors = [emit.load(emit.at(rows_at, builder.mul(row_step, integer(row))), V16I) for row in range(16)]
        for bit in (8, 4, 2, 1):
            low, high = _pairs(bit)
            for row in (row for row in range(16) if not row & bit):
                pair = vectors[row], vectors[row + bit]
                vectors[row], vectors[row + bit] = emit.shuffle(*pair, low), emit.shuffle(*pair, high)
        for row, vector in enumerate(vectors):
            emit.store(vector, emit.at(out_at, builder.mul(out_step, integer(row))))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen
