"""Softmax of a row of scores and rope of a head by vectors; see `vector_intrinsics`.

The compiler's own loops take 64 numbers at a time and what is left over one by one: of 48 keys, or of the 32 pairs of a
head, all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from plait.kernels.scalar_intrinsics import F32, I32, exponential, integer
from plait.kernels.vector_intrinsics import V16F, V16H, ZERO, Emit, emitted, narrowed, of_bits, widened


def _rounded(emit: Emit, value: Any) -> Any:
    """Float32 rounded to the variant's dtype."""
    if not emit.bfloat16:
        return value
    return of_bits(emit, emit.builder.bitcast(narrowed(emit, value), V16H))


def _reduced(emit: Emit, vector: Any, join: Callable[[Any, Any], Any]) -> Any:
    """One number of the 16: halves joined, their halves, and so on."""
    for width in (8, 4, 2, 1):
        lanes = [(lane + width) % 16 for lane in range(16)]
        vector = join(vector, emit.shuffle(vector, vector, lanes))
    return emit.builder.extract_element(vector, ir.Constant(I32, 0))


@intrinsic
def softmax_of_row(typingctx, like, scores, count, factor, sink, probs):
    """probs = softmax(factor · scores) with a further score that has no share; scores hold anything afterwards.

    Args:
        scores, probs: addresses, of float32 and of the dtype.
        count: a multiple of 16.
        factor: above 0.
        sink: the further score, −inf for none.
    """

    def body(emit, scores_at, count, factor, sink, probs_at):
        builder = emit.builder

        def larger(left: Any, right: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", left, right), left, right)

        def place(index: Any) -> Any:
            return emit.at(scores_at, builder.mul(index, integer(4)))

        lowest = ir.Constant(V16F, [float("-inf")] * 16)
        (most,) = emit.loop(
            integer(0), count, 16, [lowest], lambda index, most: [larger(emit.load(place(index), V16F), most[0])]
        )
        top = larger(builder.fmul(_reduced(emit, most, larger), factor), sink)
        tops, factors = emit.splat(top), emit.splat(factor)

        def weigh(index: Any, totals: list[Any]) -> list[Any]:
            score = builder.fmul(emit.load(place(index), V16F), factors)
            weight = exponential(builder, builder.fsub(score, tops))
            emit.store(weight, place(index))
            return [builder.fadd(totals[0], weight)]

        (totals,) = emit.loop(integer(0), count, 16, [ZERO], weigh)
        total = builder.fadd(_reduced(emit, totals, builder.fadd), exponential(builder, builder.fsub(sink, top)))
        inverse = emit.splat(builder.fdiv(ir.Constant(F32, 1.0), total))

        def share(index: Any, totals: list[Any]) -> list[Any]:
            weight = builder.fmul(emit.load(place(index), V16F), inverse)
            emit.store_rounded(weight, emit.at(probs_at, builder.mul(index, integer(emit.element_bytes))))
            return totals

        emit.loop(integer(0), count, 16, [], share)

    return types.void(like, types.int64, types.int64, types.float32, types.float32, types.int64), emitted(body)


@intrinsic
def rotated(typingctx, like, x, cos, sin, half, out):
    """out [2 half] = x with its pairs (d, half + d) turned: `apply_rotary_pos_emb` of Transformers, rounded as there.

    Args:
        x, out: addresses; of cos and sin [half], in float32, too.
        half: a multiple of 16.
    """

    def body(emit, x_at, cos_at, sin_at, half, out_at):
        builder = emit.builder

        def pair(index: Any, totals: list[Any]) -> list[Any]:
            low_offset = builder.mul(index, integer(emit.element_bytes))
            high_offset = builder.mul(builder.add(index, half), integer(emit.element_bytes))
            low, high = widened(emit, emit.at(x_at, low_offset)), widened(emit, emit.at(x_at, high_offset))
            offset = builder.mul(index, integer(4))
            cos, sin = emit.load(emit.at(cos_at, offset), V16F), emit.load(emit.at(sin_at, offset), V16F)
            low_cos, high_sin, high_cos, low_sin = (
                _rounded(emit, builder.fmul(*factors)) for factors in ((low, cos), (high, sin), (high, cos), (low, sin))
            )
            emit.store_rounded(builder.fsub(low_cos, high_sin), emit.at(out_at, low_offset))
            emit.store_rounded(builder.fadd(high_cos, low_sin), emit.at(out_at, high_offset))
            return totals

        emit.loop(integer(0), half, 16, [], pair)

    return types.void(like, *[types.int64] * 5), emitted(body)
