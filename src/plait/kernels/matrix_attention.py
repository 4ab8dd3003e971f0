"""Attention over the block pool by the CPU's matrix unit, in bfloat16: `paged_attention.attend` where there is one.

Rows of a sample that see the same blocks are computed together, up to 16, head by head; a row alone with all heads that
share its keys. Keys and values are turned once for all of them. A row's numbers are those that it has alone.

Shapes: see `kernels.paged_attention`.
"""

from __future__ import annotations

import numpy as np

from plait.compiled import AVAILABLE, njit

if AVAILABLE:
    from plait.kernels.attention_intrinsics import KEYS, ask
    from plait.kernels.matrix_attention_intrinsics import (
        ATTENDED_ROWS,
        turned_values,
        unit_scores,
        unit_weighted,
        use_unit_for_attention,
    )
    from plait.kernels.matrix_intrinsics import leave_unit
    from plait.kernels.product_intrinsics import transposed
    from plait.kernels.scores import LOWEST, seen_blocks, to_shares
else:
    ATTENDED_ROWS, KEYS = 16, 16

_TURNED_BYTES = 1024
"""Bytes of 16 keys of 32 dims."""


@njit(nogil=True, error_model="numpy", forceinline=True)
def _rows_of_one_view(row, stop_row, first_row, held, seen_TK, depths_T, window):
    """The row behind those, from `row` on, that look at the same blocks; at most ATTENDED_ROWS."""
    depth = depths_T[row] if len(seen_TK) else row - first_row
    first_block, stop_block = seen_blocks(held, row - first_row, depth, window)
    behind = row + 1
    while behind < min(stop_row, row + ATTENDED_ROWS):
        depth = depths_T[behind] if len(seen_TK) else behind - first_row
        first, stop = seen_blocks(held, behind - first_row, depth, window)
        if first != first_block or stop != stop_block:
            break
        behind += 1
    return behind, first_block, stop_block


@njit(nogil=True, error_model="numpy", forceinline=True)
def _turn_keys(key_pool, table_M, first_block, stop_block, block_step, key_size, turned, next_pool, next_table_M, asks):
    """Keys of these blocks to `turned`; where `asks`, those of the next head are asked for."""
    slices = key_size // 32
    for block in range(first_block, stop_block):
        block_at = key_pool + np.int64(table_M[block]) * block_step
        turned_at = turned + (block - first_block) * slices * _TURNED_BYTES
        for number in range(slices):
            transposed(block_at + 64 * number, 2 * key_size, turned_at + number * _TURNED_BYTES, 64)
        if asks:
            ask(next_pool + np.int64(next_table_M[block]) * block_step, KEYS * key_size // 32)


@njit(nogil=True, error_model="numpy", forceinline=True)
def attend_by_unit(
    like, query, query_stride, out, out_stride, key_pool, value_pool, sizes, tables_SM, starts_S1, held_S,
    seen_TK, depths_T, row_start, row_stop, scale, window, softcap, sinks_H, room_XK, probs_XK, turned_X,
):  # fmt: skip
    """See `paged_attention.attend`; D and E are multiples of 32.

    Args:
        room_XK, probs_XK: for G · ATTENDED_ROWS rows.
        turned_X: for the keys or the values of all blocks of a sample, of one head, and 64 bytes.
    """
    num_heads, num_key_heads, key_size, value_size = sizes
    num_shared = num_heads // num_key_heads
    key_bytes, value_bytes = 2 * KEYS * key_size, 2 * KEYS * value_size
    columns = 64 if value_size % 64 == 0 else 32
    turned = (turned_X.ctypes.data + 63) // 64 * 64
    room_step, probs_step = 4 * room_XK.shape[1], 2 * probs_XK.shape[1]
    ready_for = 0
    for sample in range(len(held_S)):
        of_sample, held = np.int64(starts_S1[sample]), np.int64(held_S[sample])
        first_row, stop_row = max(of_sample, row_start), min(np.int64(starts_S1[sample + 1]), row_stop)
        for head in range(num_key_heads):
            next_head = (head + 1) % num_key_heads
            next_sample = min(sample + 1, len(held_S) - 1) if next_head == 0 else sample
            row = first_row
            while row < stop_row:
                behind, first_block, stop_block = _rows_of_one_view(
                    row, stop_row, of_sample, held, seen_TK, depths_T, window
                )
                by_heads = behind == row + 1 and num_shared <= ATTENDED_ROWS
                calls, rows = (1, num_shared) if by_heads else (num_shared, behind - row)
                query_step, out_step = (2 * key_size, 2 * value_size) if by_heads else (query_stride, out_stride)
                query_at = query + (row - row_start) * query_stride + head * num_shared * key_size * 2
                out_at = out + (row - row_start) * out_stride + head * num_shared * value_size * 2
                if rows != ready_for:
                    use_unit_for_attention(rows)
                    ready_for = rows
                num_blocks = stop_block - first_block
                _turn_keys(
                    key_pool + head * key_bytes, tables_SM[sample], first_block, stop_block,
                    num_key_heads * key_bytes, key_size, turned,
                    key_pool + next_head * key_bytes, tables_SM[next_sample], row == first_row,
                )  # fmt: skip
                for call in range(calls):
                    unit_scores(
                        query_at + call * key_size * 2, query_step, turned, key_size // 32, num_blocks,
                        room_XK.ctypes.data + call * rows * room_step, room_step,
                    )  # fmt: skip
                for number in range(calls * rows):
                    shared, new_row = (number, row) if by_heads else (number // rows, row + number % rows)
                    scores_K = room_XK[number, : num_blocks * KEYS]
                    sink = sinks_H[head * num_shared + shared] if len(sinks_H) else LOWEST
                    to_shares(
                        like, True, scores_K, probs_XK[number, : num_blocks * KEYS], scale, new_row, of_sample, held,
                        seen_TK, depths_T, window, softcap, sink,
                    )  # fmt: skip
                for column in range(0, value_size, columns):
                    for block in range(first_block, stop_block):
                        value_at = value_pool + head * value_bytes + 2 * column
                        value_at += np.int64(tables_SM[sample, block]) * num_key_heads * value_bytes
                        turned_at = turned + (block - first_block) * KEYS * columns * 2
                        turned_values(value_at, 2 * value_size, columns // 16, turned_at)
                        if row == first_row and column == 0:
                            next_at = value_pool + next_head * value_bytes
                            next_at += np.int64(tables_SM[next_sample, block]) * num_key_heads * value_bytes
                            ask(next_at, value_bytes // 64)
                    for call in range(calls):
                        unit_weighted(
                            rows, columns // 16, probs_XK.ctypes.data + call * rows * probs_step, probs_step,
                            turned, num_blocks, out_at + (call * value_size + column) * 2, out_step,
                        )  # fmt: skip
                row = behind
    leave_unit()
