"""The Triton programs behind `device_attention`. Imports triton; TRITON_INTERPRET=1 runs them on a CPU, for tests.

A program has one tile: M = 16 or more pairs of a row (new token) and one of the G query heads that share a key head, of
one sample; it walks over the keys that its rows see, or over one of SPLITS parts of them, N at a time, with a running
maximum and sum (Milakov and Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135). Parts of the keys
are put together by `merge` (flash decoding).

Shapes: T new tokens, Hq query heads, Hkv key heads, D and E head sizes of keys and of values, P tokens of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["num_tokens", "tiles", "window"],
    do_not_specialize_on_alignment=["tables", "held"],  # of chunks of prompts they begin behind those of rows
)
def attend(
    query,
    query_row,
    query_head,
    key_pool,
    value_pool,
    out,
    tops,
    sums,
    tables,
    table_row,
    starts,
    held,
    seen,
    depths,
    sinks,
    num_tokens,
    tiles,
    window,
    scale,
    softcap,
    GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    TREES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Grid (samples · tiles, Hkv, SPLITS); ROWS rows of a tile. Without splits `out` is [T, Hq, E] in the dtype of the
    query; with them float32 [SPLITS, T, Hq, E] that is not divided yet, with `tops` and `sums` [SPLITS, T, Hq].
    WIDE: products in float32, for the interpreter, which multiplies the bits of a bfloat16."""
    sample = tl.program_id(0) // tiles
    first = (tl.program_id(0) % tiles) * ROWS
    head = tl.program_id(1)
    part = tl.program_id(2)
    start = tl.load(starts + sample)
    count = tl.load(starts + sample + 1) - start
    if first >= count:
        return
    have = tl.load(held + sample)
    places_M = tl.arange(0, M)
    row_M = first + places_M // GROUP
    there_M = (places_M < ROWS * GROUP) & (row_M < count)
    token_M = (start + row_M).to(tl.int64)
    head_M = head * GROUP + places_M % GROUP
    in_D = tl.arange(0, WIDE_D)
    in_E = tl.arange(0, WIDE_E)
    query_MD = tl.load(
        query + token_M[:, None] * query_row + head_M.to(tl.int64)[:, None] * query_head + in_D[None, :],
        mask=there_M[:, None] & (in_D < D)[None, :],
        other=0.0,
    )
    if WIDE:
        query_MD = query_MD.to(tl.float32)
    if TREES:
        bits_M = tl.load(seen + token_M, mask=there_M, other=0)
        position_M = have + tl.load(depths + token_M, mask=there_M, other=0)
        stop = have + count
    else:
        position_M = have + row_M
        stop = have + tl.minimum(count, first + ROWS)
    begin = 0
    if WINDOW:
        # The position of a row is at least what is held, in a tree too.
        begin = tl.maximum(have + (0 if TREES else first) - window + 1, 0) // N * N
    steps = tl.cdiv(tl.cdiv(stop - begin, N), SPLITS)
    from_key = begin + part * steps * N
    to_key = tl.minimum(from_key + steps * N, stop)

    top_M = tl.full([M], -float("inf"), tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    total_ME = tl.zeros([M, WIDE_E], tl.float32)
    for at in range(from_key, to_key, N):
        key_N = at + tl.arange(0, N)
        known_N = key_N < to_key
        block_N = tl.load(tables + sample * table_row + key_N // P, mask=known_N, other=0).to(tl.int64)
        lines_N = (block_N * KEY_HEADS + head) * P + key_N % P
        key_DN = tl.load(
            key_pool + lines_N[None, :] * D + in_D[:, None], mask=known_N[None, :] & (in_D < D)[:, None], other=0.0
        )
        if WIDE:
            key_DN = key_DN.to(tl.float32)
        scores_MN = tl.dot(query_MD, key_DN, input_precision="ieee") * scale
        if SOFTCAP:
            scores_MN = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores_MN / softcap)) - 1.0)  # softcap · tanh
        new_N = key_N - have
        if TREES:
            bit_MN = (bits_M[:, None] >> tl.maximum(new_N, 0)[None, :].to(tl.int64)) & 1
            sees_MN = (new_N < 0)[None, :] | (bit_MN == 1)
        else:
            sees_MN = key_N[None, :] <= position_M[:, None]
        if WINDOW:
            if TREES:
                depth_N = tl.load(depths + start + new_N, mask=known_N & (new_N >= 0), other=0)
                of_key_N = tl.where(new_N < 0, key_N, have + depth_N)
            else:
                of_key_N = key_N
            sees_MN = sees_MN & (position_M[:, None] - of_key_N[None, :] < window)
        scores_MN = tl.where(sees_MN & known_N[None, :], scores_MN, -float("inf"))
        higher_M = tl.maximum(top_M, tl.max(scores_MN, 1))
        safe_M = tl.where(higher_M == -float("inf"), 0.0, higher_M)
        share_MN = tl.exp(scores_MN - safe_M[:, None])
        before_M = tl.exp(top_M - safe_M)
        sum_M = sum_M * before_M + tl.sum(share_MN, 1)
        value_NE = tl.load(
            value_pool + lines_N[:, None] * E + in_E[None, :], mask=known_N[:, None] & (in_E < E)[None, :], other=0.0
        )
        if WIDE:
            value_NE = value_NE.to(tl.float32)
        total_ME = total_ME * before_M[:, None]
        total_ME += tl.dot(share_MN.to(value_NE.dtype), value_NE, input_precision="ieee")
        top_M = higher_M

    heads = KEY_HEADS * GROUP
    kept_ME = there_M[:, None] & (in_E < E)[None, :]
    if SPLITS == 1:
        if SINKS:
            sink_M = tl.load(sinks + head_M, mask=there_M, other=0.0).to(tl.float32)
            higher_M = tl.maximum(top_M, sink_M)
            before_M = tl.exp(top_M - higher_M)
            sum_M = sum_M * before_M + tl.exp(sink_M - higher_M)
            total_ME = total_ME * before_M[:, None]
        sum_M = tl.where(there_M, sum_M, 1.0)
        line_M = token_M * heads + head_M
        tl.store(out + line_M[:, None] * E + in_E[None, :], total_ME / sum_M[:, None], mask=kept_ME)
    else:
        line_M = (part * num_tokens + token_M) * heads + head_M
        tl.store(out + line_M[:, None] * E + in_E[None, :], total_ME, mask=kept_ME)
        tl.store(tops + line_M, top_M, mask=there_M)
        tl.store(sums + line_M, sum_M, mask=there_M)


@triton.jit(do_not_specialize=["num_tokens"])
def merge(
    parts,
    tops,
    sums,
    out,
    sinks,
    num_tokens,
    HEADS: tl.constexpr,
    E: tl.constexpr,
    WIDE_E: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Grid (T, Hq): the parts of `attend` become `out` [T, Hq, E]."""
    line = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    part_S = tl.arange(0, SPLITS)
    line_S = part_S.to(tl.int64) * num_tokens * HEADS + line
    in_E = tl.arange(0, WIDE_E)
    top_S = tl.load(tops + line_S)
    top = tl.max(top_S, 0)
    if SINKS:
        sink = tl.load(sinks + tl.program_id(1)).to(tl.float32)
        top = tl.maximum(top, sink)
    weight_S = tl.exp(top_S - top)
    total = tl.sum(weight_S * tl.load(sums + line_S), 0)
    if SINKS:
        total += tl.exp(sink - top)
    part_SE = tl.load(parts + line_S[:, None] * E + in_E[None, :], mask=(in_E < E)[None, :], other=0.0)
    out_E = tl.sum(weight_S[:, None] * part_SE, 0) / total
    tl.store(out + line * E + in_E, out_E, mask=in_E < E)


@triton.jit(do_not_specialize=["key_head", "key_row", "value_head", "value_row"])
def store(
    key,
    key_head,
    key_row,
    value,
    value_head,
    value_row,
    key_pool,
    value_pool,
    places,
    KEY_HEADS: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_E: tl.constexpr,
):
    """Grid (T, Hkv): keys [Hkv, T, D] and values [Hkv, T, E] into the blocks, at the places [T] of their tokens."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    place = tl.load(places + token).to(tl.int64)
    line = (place // P * KEY_HEADS + head) * P + place % P
    in_D = tl.arange(0, WIDE_D)
    in_E = tl.arange(0, WIDE_E)
    key_D = tl.load(key + head * key_head + token * key_row + in_D, mask=in_D < D)
    tl.store(key_pool + line * D + in_D, key_D, mask=in_D < D)
    value_E = tl.load(value + head * value_head + token * value_row + in_E, mask=in_E < E)
    tl.store(value_pool + line * E + in_E, value_E, mask=in_E < E)


INTERPRETED = not isinstance(attend, triton.JITFunction)
"""Whether Triton's interpreter runs the programs."""
