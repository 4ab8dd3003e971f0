"""Attention over the block pool on a CPU, compiled by numba where it is installed.

Equal to its plain twin (`generation.paged`) up to rounding; a row is computed from that row alone, to the bit, whatever
else is in the batch. Numbers of bfloat16 tensors travel as uint16 and are widened in registers.

Measured on one core of an AMD EPYC (AVX-512, bfloat16), 9 heads on 3 of 64, 192 keys, against gathered keys and torch's
products: 8 rows 34 µs in place of 162, 32 rows 118 in place of 623.

Shapes: T rows (new tokens), S samples, M columns of the block tables, N blocks of P tokens, Hq query heads, Hkv key
heads, G = Hq / Hkv, D and E head sizes of keys and of values, K keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.compiled import AVAILABLE, njit
from plait.kernels.paged_call import PagedCall

try:
    from numba import carray

    from plait.kernels.attention_intrinsics import KEYS, WEIGHTED_COLUMNS, WEIGHTED_ROWS, ask, scores, weighted
    from plait.kernels.matrix_attention import ATTENDED_ROWS, attend_by_unit
    from plait.kernels.scalar_intrinsics import matrix_units, narrow, pointer, supported, widen
    from plait.kernels.scores import LOWEST, seen_blocks, to_shares
except ImportError:
    KEYS, WEIGHTED_COLUMNS, WEIGHTED_ROWS, ATTENDED_ROWS = 16, (64, 32), 4, 16


Array = Any
"""A numpy array: a view of a tensor."""

_ZERO, _ONE = np.float32(0), np.float32(1)


def fast(dtype: torch.dtype) -> bool:
    """Whether this CPU has the vector instructions for a dtype."""
    return AVAILABLE and dtype in (torch.float32, torch.bfloat16) and supported()


def by_matrix_unit(dtype: torch.dtype) -> bool:
    """Whether this CPU has a unit for products of matrices of a dtype, which this process may use."""
    return dtype == torch.bfloat16 and fast(dtype) and matrix_units()


def array_of(tensor: Tensor) -> Array:
    """A view of a tensor of any shape on the CPU: float32 as it is, bfloat16 as uint16."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


@njit(nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"}, forceinline=True)
def _scores_of_any_size(query_D, keys_KD, scale, out_K):
    for k in range(keys_KD.shape[0]):
        total = _ZERO
        for d in range(len(query_D)):
            total += widen(query_D[d]) * widen(keys_KD[k, d])
        out_K[k] = total * scale


@njit(nogil=True, error_model="numpy", fastmath={"contract"}, forceinline=True)
def _add_weighted_of_any_size(probs_K, values_KE, total_E):
    for k in range(values_KE.shape[0]):
        prob = widen(probs_K[k])
        for e in range(len(total_E)):
            total_E[e] += prob * widen(values_KE[k, e])


@njit(nogil=True, error_model="numpy", forceinline=True)
def attend(
    like, query, query_stride, out, out_stride, key_pool, value_pool, sizes, vectors,
    tables_SM, starts_S1, held_S, seen_TK, depths_T, row_start, row_stop, scale, window, softcap, sinks_H,
    room_GK, probs_GK, turned_X,
):  # fmt: skip
    """Attention of the rows row_start … row_stop − 1 over the blocks of their samples.

    Args:
        query, out: addresses of row row_start: [Hq, D], [Hq, E] each, strides of rows in bytes.
        key_pool, value_pool: addresses of [N, Hkv, KEYS, D], [N, Hkv, KEYS, E].
        sizes: Hq, Hkv, D, E.
        vectors: D and E are of sizes that `scores` and `weighted` take.
        seen_TK: uint8, row t sees new token k of its sample; of length 0 where all are chains.
        depths_T: int64, of each row in its sample's tree; read where seen_TK is.
        window: 0 for none.
        softcap: float32, 0 for none.
        sinks_H: float32, of length 0 for none.
        room_GK, probs_GK: working space in float32 and in the dtype, for all keys of a sample, rounded up to blocks.
        turned_X: of length 0: by vectors. Else by the matrix unit, and G of the rooms is ATTENDED_ROWS times as large.
            All three are made by `rooms`.
    """
    if len(turned_X):
        attend_by_unit(
            like, query, query_stride, out, out_stride, key_pool, value_pool, sizes, tables_SM, starts_S1, held_S,
            seen_TK, depths_T, row_start, row_stop, scale, window, softcap, sinks_H, room_GK, probs_GK, turned_X,
        )  # fmt: skip
        return
    num_heads, num_key_heads, key_size, value_size = sizes
    num_shared = num_heads // num_key_heads
    width = like.itemsize
    key_bytes, value_bytes = KEYS * key_size * width, KEYS * value_size * width
    columns = WEIGHTED_COLUMNS[0] if value_size % WEIGHTED_COLUMNS[0] == 0 else WEIGHTED_COLUMNS[1]
    total_E = np.empty(value_size, np.float32)
    for sample in range(len(held_S)):
        first_row, stop_row = max(starts_S1[sample], row_start), min(starts_S1[sample + 1], row_stop)
        for head in range(num_key_heads):
            next_head = (head + 1) % num_key_heads
            next_sample = min(sample + 1, len(held_S) - 1) if next_head == 0 else sample
            for row in range(first_row, stop_row):
                new = row - starts_S1[sample]
                held = np.int64(held_S[sample])
                depth = depths_T[row] if len(seen_TK) else new
                first_block, stop_block = seen_blocks(held, new, depth, window)
                offset, count = first_block * KEYS, (stop_block - first_block) * KEYS
                query_at = query + (row - row_start) * query_stride + head * num_shared * key_size * width
                out_at = out + (row - row_start) * out_stride + head * num_shared * value_size * width
                for shared in range(num_shared):
                    room_K = room_GK[shared, :count]
                    for block in range(first_block, stop_block):
                        at = key_pool + (np.int64(tables_SM[sample, block]) * num_key_heads + head) * key_bytes
                        place = block * KEYS - offset
                        if row == first_row:
                            lines = key_bytes // 64 // num_shared + 1
                            next_block = np.int64(tables_SM[next_sample, block]) * num_key_heads + next_head
                            ask(key_pool + next_block * key_bytes + shared * lines * 64, lines)
                        if vectors:
                            scores(
                                like,
                                query_at + shared * key_size * width,
                                at,
                                key_size,
                                scale,
                                room_K.ctypes.data + 4 * place,
                            )
                        else:
                            _scores_of_any_size(
                                carray(pointer(query_at + shared * key_size * width), (key_size,), like.dtype),
                                carray(pointer(at), (KEYS, key_size), like.dtype),
                                scale,
                                room_K[place : place + KEYS],
                            )
                    sink = sinks_H[head * num_shared + shared] if len(sinks_H) else LOWEST
                    to_shares(
                        like, vectors, room_K, probs_GK[shared, :count], _ONE, row, np.int64(starts_S1[sample]), held,
                        seen_TK, depths_T, window, softcap, sink,
                    )  # fmt: skip
                if vectors:
                    for shared in range(0, num_shared, WEIGHTED_ROWS):
                        for column in range(0, value_size, columns):
                            weighted(
                                like,
                                min(WEIGHTED_ROWS, num_shared - shared),
                                columns,
                                probs_GK.ctypes.data + shared * probs_GK.shape[1] * width,
                                probs_GK.shape[1] * width,
                                tables_SM.ctypes.data + sample * tables_SM.shape[1] * 4,
                                first_block,
                                stop_block,
                                tables_SM.ctypes.data + next_sample * tables_SM.shape[1] * 4,
                                value_pool + head * value_bytes + column * width,
                                value_pool + next_head * value_bytes + column * width,
                                num_key_heads * value_bytes,
                                value_size * width,
                                out_at + (shared * value_size + column) * width,
                                value_size * width,
                            )
                else:
                    for shared in range(num_shared):
                        total_E[:] = _ZERO
                        for block in range(first_block, stop_block):
                            at = value_pool + (np.int64(tables_SM[sample, block]) * num_key_heads + head) * value_bytes
                            place = block * KEYS - offset
                            _add_weighted_of_any_size(
                                probs_GK[shared, place : place + KEYS],
                                carray(pointer(at), (KEYS, value_size), like.dtype),
                                total_E,
                            )
                        out_E = carray(pointer(out_at + shared * value_size * width), (value_size,), like.dtype)
                        for e in range(value_size):
                            out_E[e] = narrow(like, total_E[e])


def paged_attention(call: PagedCall) -> Tensor:
    """[T, Hq, E]; float32 or bfloat16 on a CPU, blocks of KEYS tokens."""
    key_pool, value_pool, sinks = call.key_pool, call.value_pool, call.sinks
    assert key_pool.shape[2] == KEYS, f"blocks of {KEYS} tokens, got {key_pool.shape[2]}"
    assert key_pool.is_contiguous(), "the blocks of a layer are contiguous"
    assert value_pool.is_contiguous(), "the blocks of a layer are contiguous"
    query = call.query.contiguous()
    num_rows, num_heads, key_size = query.shape
    num_key_heads, value_size = value_pool.shape[1], value_pool.shape[3]
    out = query.new_empty(num_rows, num_heads, value_size)
    sizes = (num_heads, num_key_heads, key_size, value_size)
    like, vectors = array_of(query), fast(query.dtype) and key_size % 32 == 0 and value_size % 32 == 0
    by_unit = vectors and by_matrix_unit(query.dtype)
    room_1GK, probs_1GK, turned_1X = rooms(sizes, call.tables_SM.shape[1] * KEYS, by_unit, like)
    seen_TK, depths_T = seen_rows(call.starts_S1, call.ancestors)
    attend(
        like,
        query.data_ptr(),
        query.stride(0) * query.element_size(),
        out.data_ptr(),
        out.stride(0) * out.element_size(),
        key_pool.data_ptr(),
        value_pool.data_ptr(),
        sizes,
        vectors,
        call.tables_SM.contiguous().numpy(),
        call.starts_S1.numpy(),
        call.held_S.numpy(),
        seen_TK,
        depths_T,
        0,
        num_rows,
        np.float32(call.scale),
        call.window or 0,
        np.float32(call.softcap or 0),
        _NO_SINKS if sinks is None else sinks.detach().float().contiguous().numpy(),
        room_1GK[0],
        probs_1GK[0],
        turned_1X[0],
    )
    return out


def rooms(
    sizes: tuple[int, int, int, int], num_keys: int, by_unit: bool, like: Array, parts: int = 1
) -> tuple[Array, Array, Array]:
    """Working space of `attend` for each of so many threads: for scores, for shares, for what is turned.

    Args:
        sizes: Hq, Hkv, D, E.
        num_keys: of the longest context, rounded up to blocks.
        by_unit: attention is by the CPU's matrix unit.
        like: has the dtype.
    """
    num_heads, num_key_heads, key_size, value_size = sizes
    shape = (parts, num_heads // num_key_heads * (ATTENDED_ROWS if by_unit else 1), num_keys)
    turned = (parts, num_keys * max(key_size, value_size) + 32 if by_unit else 0)
    return np.empty(shape, np.float32), np.empty(shape, like.dtype), np.empty(turned, like.dtype)


_NO_SINKS = np.zeros(0, np.float32)
_NO_TREE = (np.zeros((0, 0), np.uint8), np.zeros(0, np.int64))


def seen_rows(starts_S1: Tensor, ancestors: Sequence[Tensor | None] | None) -> tuple[Array, Array]:
    """(seen [T, most new tokens of a sample] uint8, depths [T] int64) as `attend` reads them."""
    if ancestors is None:
        return _NO_TREE
    starts = starts_S1.tolist()
    counts = [stop - start for start, stop in pairwise(starts)]
    seen_TK = np.zeros((starts[-1], max(counts)), np.uint8)
    depths_T = np.zeros(starts[-1], np.int64)
    for start, count, tree in zip(starts[:-1], counts, ancestors, strict=True):
        rows = np.tri(count, dtype=np.uint8) if tree is None else tree.numpy().astype(np.uint8)
        seen_TK[start : start + count, :count] = rows
        depths_T[start : start + count] = rows.sum(1, dtype=np.int64) - 1
    return seen_TK, depths_T
