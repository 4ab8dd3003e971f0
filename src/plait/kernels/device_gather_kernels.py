"""The Triton programs behind `device_gather`. Imports triton; TRITON_INTERPRET=1 runs them on a CPU, for tests.

Shapes: T tokens of the row, K places, H key heads, D head size.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_places"])
def gather(
    key,
    key_row,
    key_head,
    value,
    value_row,
    value_head,
    keys,
    values,
    token_of,
    num_places,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDE_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid (K / ROWS, H): `keys` and `values` [K, H, D] are those of the token of each place."""
    place_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    there_R = place_R < num_places
    token_R = tl.load(token_of + place_R, mask=there_R, other=0).to(tl.int64)
    line_R = place_R.to(tl.int64) * HEADS + head
    in_D = tl.arange(0, WIDE_D)
    there_RD = there_R[:, None] & (in_D < D)[None, :]
    key_RD = tl.load(key + token_R[:, None] * key_row + head * key_head + in_D[None, :], mask=there_RD)
    tl.store(keys + line_R[:, None] * D + in_D[None, :], key_RD, mask=there_RD)
    value_RD = tl.load(value + token_R[:, None] * value_row + head * value_head + in_D[None, :], mask=there_RD)
    tl.store(values + line_R[:, None] * D + in_D[None, :], value_RD, mask=there_RD)


@triton.jit
def fold(
    grad_keys,
    grad_values,
    key_sums,
    value_sums,
    starts,
    of_tokens,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDE_D: tl.constexpr,
    AT_A_TIME: tl.constexpr,
):
    """Grid (T, H): `key_sums` and `value_sums` [T, H, D], over the places of each token."""
    token = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    start = tl.load(starts + token)
    stop = tl.load(starts + token + 1)
    in_D = tl.arange(0, WIDE_D)
    key_D = tl.zeros([WIDE_D], tl.float32)
    value_D = tl.zeros([WIDE_D], tl.float32)
    for at in range(start, stop, AT_A_TIME):
        entry_A = at + tl.arange(0, AT_A_TIME)
        there_A = entry_A < stop
        place_A = tl.load(of_tokens + entry_A, mask=there_A, other=0).to(tl.int64)
        from_AD = (place_A * HEADS + head)[:, None] * D + in_D[None, :]
        there_AD = there_A[:, None] & (in_D < D)[None, :]
        key_D += tl.sum(tl.load(grad_keys + from_AD, mask=there_AD, other=0.0).to(tl.float32), 0)
        value_D += tl.sum(tl.load(grad_values + from_AD, mask=there_AD, other=0.0).to(tl.float32), 0)
    line = token.to(tl.int64) * HEADS + head
    tl.store(key_sums + line * D + in_D, key_D, mask=in_D < D)
    tl.store(value_sums + line * D + in_D, value_D, mask=in_D < D)
