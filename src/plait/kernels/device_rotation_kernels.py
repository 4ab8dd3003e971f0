"""The Triton program behind `device_rotation`. Imports triton; TRITON_INTERPRET=1 runs it on a CPU, for tests.

Products and sums are float32 in registers, and rounded to the dtype of the numbers where torch's operators round.

Shapes: T tokens, Hq query heads, Hkv key heads, D head size.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rotated_heads(
    x,
    out,
    head_stride,
    heads,
    cos_low,
    cos_high,
    sin_low,
    sin_high,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotate the heads of one token, HEADS at a time. `out` has them side by side."""
    dtype = x.dtype.element_ty
    at = tl.arange(0, HALF)[None, :]
    for first in range(0, heads, HEADS):
        head = (first + tl.arange(0, HEADS)[:, None]).to(tl.int64)
        is_in = (head < heads) & (at < D // 2)
        from_low = x + head * head_stride + at
        to_low = out + head * D + at
        low = tl.load(from_low, mask=is_in, other=0.0).to(tl.float32)
        high = tl.load(from_low + D // 2, mask=is_in, other=0.0).to(tl.float32)
        kept = (low * cos_low).to(dtype).to(tl.float32)
        turned = (high * sin_low).to(dtype).to(tl.float32)
        tl.store(to_low, (kept - turned).to(dtype), mask=is_in)
        kept = (high * cos_high).to(dtype).to(tl.float32)
        turned = (low * sin_high).to(dtype).to(tl.float32)
        tl.store(to_low + D // 2, (kept + turned).to(dtype), mask=is_in)


@triton.jit(do_not_specialize=["query_heads", "key_heads"])
def rotate(
    query,
    query_token,
    query_head,
    query_heads,
    key,
    key_token,
    key_head,
    key_heads,
    cos,
    sin,
    query_out,
    key_out,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BACK: tl.constexpr,
):
    """Grid (T,): queries [Hq, T, D] and keys [Hkv, T, D], whose tokens and heads are `_token` and `_head` numbers
    apart, by cos and sin [T, D]; out come [T, Hq, D] and [T, Hkv, D].

    BACK: by the transpose, which has the sines of the two halves exchanged and negated. HALF: D / 2, filled up to a
    power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, HALF)[None, :]
    is_in = at < D // 2
    low = token * D + at
    cos_low = tl.load(cos + low, mask=is_in, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + low + D // 2, mask=is_in, other=0.0).to(tl.float32)
    if BACK:
        sin_low = -tl.load(sin + low + D // 2, mask=is_in, other=0.0).to(tl.float32)
        sin_high = -tl.load(sin + low, mask=is_in, other=0.0).to(tl.float32)
    else:
        sin_low = tl.load(sin + low, mask=is_in, other=0.0).to(tl.float32)
        sin_high = tl.load(sin + low + D // 2, mask=is_in, other=0.0).to(tl.float32)
    _rotated_heads(
        query + token * query_token, query_out + token * query_heads * D, query_head, query_heads,
        cos_low, cos_high, sin_low, sin_high, D, HALF, HEADS,
    )  # fmt: skip
    _rotated_heads(
        key + token * key_token, key_out + token * key_heads * D, key_head, key_heads,
        cos_low, cos_high, sin_low, sin_high, D, HALF, HEADS,
    )  # fmt: skip
