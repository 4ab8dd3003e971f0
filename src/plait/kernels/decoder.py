"""The decoder of a dense model on a CPU as one compiled function: the counterpart of `generation.compiled_forward`.

Rounds where the Transformers layer rounds, so that both agree up to the order of sums. Every row is computed from that
row alone, to the bit, whatever the batch holds; so a prompt may be taken whole, in chunks or token by token.

Several threads share the work: each calls `decoder` with its number, and they meet at barriers.

Shapes: T rows (new tokens), C rows of a chunk, S samples, L layers, R rows that are read, Hq query heads, Hkv key
heads, G = Hq / Hkv, D head size, H hidden size, I intermediate size, K terms and N columns of a product, A columns of
what adapters make of its input.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from plait.compiled import AVAILABLE, njit
from plait.kernels.paged_attention import KEYS, Array, attend
from plait.kernels.products import TILE_COLUMNS, product

if AVAILABLE:
    from numba import carray

    from plait.kernels.row_intrinsics import rotated
    from plait.kernels.scalar_intrinsics import barrier, exp, narrow, pointer, widen

CHUNK_ROWS = 256
"""Rows that pass all layers together: enough to read the weights seldom, few enough for a second-level cache."""

SILU, GELU_TANH = 0, 1
ROUNDED, OFFSET = 0, 1
"""Norms: weight · round(x / rms), as llama has it, or round((1 + weight) · x / rms), as gemma; `OFFSET` is given 1 +
weight."""

_ZERO, _ONE = np.float32(0), np.float32(1)
_GELU_SLOPE, _GELU_CUBE = np.float32(2 * 0.7978845608028654), np.float32(0.044715)


class Sizes(NamedTuple):
    num_heads: int
    num_key_heads: int
    head_size: int
    intermediate: int
    norm: int
    activation: int
    head_norms: int
    """1 where queries and keys are normalised before rope."""
    vectors: int
    """1 where `attend` may use vector instructions."""
    matrix: int
    """1 where products are left to the CPU's matrix unit."""


class Step(NamedTuple):
    """A RaggedBatch as arrays."""

    positions_T: Array
    places_T: Array
    tables_SM: Array
    starts_S1: Array
    held_S: Array
    seen_TK: Array
    depths_T: Array
    read_R: Array
    """Ascending, none twice."""


class Weights(NamedTuple):
    packed_L4: Array
    """int64: addresses of query-key-value, output, gate-up and down weights."""
    adapters_L43: Array
    """int64: of each of these, addresses of the adapters' A [A, K] and B [N, A], laid out like it, and A, a multiple of
    TILE_COLUMNS; 0: nothing is added."""
    adapter_scale: float
    """Factor of what adapters add."""
    norms_LN: Array
    """float32 [L, 2 H + 2 D]: before attention, before the MLP, of query heads, of key heads."""
    last_norm_H: Array
    settings_L2: Array
    """int64: 1 with rope, window (0: none)."""
    scales_L: Array
    """float32: of the scores."""
    eps: float
    """float32, as all floats here."""
    residual: float
    """Factor of what a layer adds."""
    cos_PD: Array
    """float32 [positions, D / 2]."""
    sin_PD: Array


class Room(NamedTuple):
    """Working space of one chunk; rows are as wide as the panels of the product that fills them, or wider."""

    normed_CH: Array
    qkv_CN: Array
    query_CN: Array
    attended_CN: Array
    delta_CN: Array
    gate_up_CN: Array
    gated_CI: Array
    low_CA: Array
    adapted_CN: Array
    """What adapters make of an input, and what they add to an output."""
    scores_QGK: Array
    probs_QGK: Array
    turned_QX: Array
    """These as `paged_attention.rooms` makes them."""


@njit(nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"}, forceinline=True)
def _normalise(x_H, weight_H, eps, kind, out_H):
    total = _ZERO
    for h in range(len(weight_H)):
        x = widen(x_H[h])
        total += x * x
    inverse = _ONE / np.sqrt(total / np.float32(len(weight_H)) + eps)
    if kind == OFFSET:
        for h in range(len(weight_H)):
            out_H[h] = narrow(out_H, widen(x_H[h]) * inverse * weight_H[h])
    else:
        for h in range(len(weight_H)):
            out_H[h] = narrow(out_H, widen(narrow(out_H, widen(x_H[h]) * inverse)) * weight_H[h])


@njit(nogil=True, error_model="numpy", fastmath={"contract"}, forceinline=True)
def _add(x_H, delta_H, factor):
    if factor == _ONE:
        for h in range(len(x_H)):
            x_H[h] = narrow(x_H, widen(x_H[h]) + widen(delta_H[h]))
    else:
        for h in range(len(x_H)):
            x_H[h] = narrow(x_H, widen(x_H[h]) + widen(narrow(x_H, widen(delta_H[h]) * factor)))


@njit(nogil=True, error_model="numpy", fastmath={"contract"}, forceinline=True)
def _add_scaled(out_N, added_N, scale):
    for n in range(len(out_N)):
        out_N[n] = narrow(out_N, widen(out_N[n]) + widen(narrow(out_N, widen(added_N[n]) * scale)))


@njit(nogil=True, error_model="numpy", fastmath={"contract"}, forceinline=True)
def _gated(gate_up_N, activation, out_I):
    size = len(out_I)
    if activation == SILU:
        for i in range(size):
            x = widen(gate_up_N[i])
            gate = narrow(out_I, x / (_ONE + exp(-x)))
            out_I[i] = narrow(out_I, widen(gate) * widen(gate_up_N[size + i]))
    else:
        for i in range(size):
            x = widen(gate_up_N[i])
            gate = narrow(out_I, x / (_ONE + exp(-_GELU_SLOPE * (x + _GELU_CUBE * x * x * x))))
            out_I[i] = narrow(out_I, widen(gate) * widen(gate_up_N[size + i]))


@njit(nogil=True, error_model="numpy", fastmath={"contract"}, forceinline=True)
def _rotate(x_D, cos_D, sin_D, out_D):
    """`apply_rotary_pos_emb` of Transformers; cos and sin are those of its first half, which it repeats."""
    half = len(cos_D)
    for d in range(half):
        low, high = widen(x_D[d]), widen(x_D[half + d])
        first = widen(narrow(out_D, low * cos_D[d])) - widen(narrow(out_D, high * sin_D[d]))
        second = widen(narrow(out_D, high * cos_D[d])) + widen(narrow(out_D, low * sin_D[d]))
        out_D[d] = narrow(out_D, first)
        out_D[half + d] = narrow(out_D, second)


@njit(nogil=True, error_model="numpy", forceinline=True)
def _place(qkv_N, norms_2D, eps, sizes, rope, cos_D, sin_D, query_N, key_pool, value_pool, place):
    """Norms and rope of a row's queries and of its keys; these and its values go into the pool.

    Outputs lie elsewhere than inputs, as a vectoriser likes them.
    """
    size, num_heads, num_key_heads = sizes.head_size, sizes.num_heads, sizes.num_key_heads
    block, offset = place // KEYS, place % KEYS
    for head in range(num_heads + num_key_heads):
        x_D = qkv_N[head * size : (head + 1) * size]
        if head < num_heads:
            out_D = query_N[head * size : (head + 1) * size]
        else:
            row = ((block * num_key_heads + head - num_heads) * KEYS + offset) * size
            out_D = carray(pointer(key_pool + row * qkv_N.itemsize), (size,), qkv_N.dtype)
        if sizes.head_norms:
            _normalise(x_D, norms_2D[:size] if head < num_heads else norms_2D[size:], eps, sizes.norm, x_D)
        if rope and sizes.vectors == 1:
            rotated(qkv_N, x_D.ctypes.data, cos_D.ctypes.data, sin_D.ctypes.data, len(cos_D), out_D.ctypes.data)
        elif rope:
            _rotate(x_D, cos_D, sin_D, out_D)
        else:
            out_D[:] = x_D
    for head in range(num_key_heads):
        first = (num_heads + num_key_heads + head) * size
        row = ((block * num_key_heads + head) * KEYS + offset) * size
        out_D = carray(pointer(value_pool + row * qkv_N.itemsize), (size,), qkv_N.dtype)
        out_D[:] = qkv_N[first : first + size]


@njit(nogil=True, error_model="numpy", forceinline=True)
def _meet(threads):
    """Wait until all threads are here."""
    if threads[1] > 1:
        barrier(threads[2], threads[1])


@njit(nogil=True, error_model="numpy")
def project(x_CK, weight, adapter_3, scale, widths, out_CN, room, num_rows, matrix, threads):
    """out [rows, N] = W x + bias, and with adapters + scale · B (A x), rounded where the plain layers round.

    Args:
        weight: address; adapter_3: as of `Weights.adapters_L43`; widths: K, N.
        threads: number of this one, of all, address of their state.
    """
    part, parts, _ = threads
    product(x_CK, x_CK, weight, widths, out_CN, num_rows, part, parts, matrix)
    num_low = adapter_3[2]
    if num_low == 0:
        return
    product(x_CK, x_CK, adapter_3[0], (widths[0], num_low), room.low_CA, num_rows, part, parts, matrix)
    _meet(threads)
    added_CN = room.adapted_CN
    product(x_CK, room.low_CA, adapter_3[1], (num_low, widths[1]), added_CN, num_rows, part, parts, matrix)
    num_panels = (widths[1] + TILE_COLUMNS - 1) // TILE_COLUMNS
    first, stop = num_panels * part // parts * TILE_COLUMNS, num_panels * (part + 1) // parts * TILE_COLUMNS
    for row in range(num_rows):  # this thread has made these columns of both
        _add_scaled(out_CN[row, first:stop], added_CN[row, first:stop], scale)


@njit(nogil=True, error_model="numpy")
def decoder(x_TH, pools_L2, step, weights, sizes, room, out_RH, state, part, parts):
    """Hidden states after the final norm of the rows that are read; new keys and values go into the pool.

    Args:
        x_TH: embeddings; holds anything afterwards.
        pools_L2: int64, addresses of key and value blocks.
        step, weights, sizes, room: see the classes.
        state: int64 [2], zeros; shared by the threads.
        part, parts: number of this thread, and of threads.
    """
    num_rows, hidden = x_TH.shape
    num_layers = len(weights.scales_L)
    width = x_TH.itemsize
    matrix = sizes.matrix == 1
    threads = (part, parts, state.ctypes.data)
    scale = weights.adapter_scale
    attention = (sizes.num_heads, sizes.num_key_heads, sizes.head_size, sizes.head_size)
    attended, all_heads = (
        sizes.num_heads * sizes.head_size,
        (sizes.num_heads + 2 * sizes.num_key_heads) * sizes.head_size,
    )
    widths = ((hidden, all_heads), (attended, hidden), (hidden, 2 * sizes.intermediate), (sizes.intermediate, hidden))
    done = 0
    for start in range(0, num_rows, CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, num_rows)
        count = stop - start
        for layer in range(num_layers):
            norms_N, packed_4, adapters_43 = (
                weights.norms_LN[layer],
                weights.packed_L4[layer],
                weights.adapters_L43[layer],
            )
            first, behind = count * part // parts, count * (part + 1) // parts
            for row in range(first, behind):
                if layer:
                    _add(x_TH[start + row], room.delta_CN[row, :hidden], weights.residual)
                _normalise(x_TH[start + row], norms_N[:hidden], weights.eps, sizes.norm, room.normed_CH[row])
            _meet(threads)
            project(
                room.normed_CH, packed_4[0], adapters_43[0], scale, widths[0], room.qkv_CN, room, count, matrix, threads
            )  # fmt: skip
            _meet(threads)
            rope, window = weights.settings_L2[layer, 0], weights.settings_L2[layer, 1]
            for row in range(first, behind):
                position = step.positions_T[start + row]
                _place(
                    room.qkv_CN[row], norms_N[2 * hidden :], weights.eps, sizes, rope, weights.cos_PD[position],
                    weights.sin_PD[position], room.query_CN[row], pools_L2[layer, 0], pools_L2[layer, 1],
                    step.places_T[start + row],
                )  # fmt: skip
            _meet(threads)
            attend(
                x_TH,
                room.query_CN.ctypes.data + first * room.query_CN.shape[1] * width, room.query_CN.shape[1] * width,
                room.attended_CN.ctypes.data + first * room.attended_CN.shape[1] * width,
                room.attended_CN.shape[1] * width,
                pools_L2[layer, 0], pools_L2[layer, 1], attention, sizes.vectors == 1,
                step.tables_SM, step.starts_S1, step.held_S, step.seen_TK, step.depths_T, start + first, start + behind,
                weights.scales_L[layer], window, _ZERO, weights.scales_L[:0],
                room.scores_QGK[part], room.probs_QGK[part], room.turned_QX[part],
            )  # fmt: skip
            _meet(threads)
            if layer == num_layers - 1:
                count = _keep_read(x_TH, room.attended_CN, step.read_R, done, start, stop, part)
                first, behind = count * part // parts, count * (part + 1) // parts
                _meet(threads)
            project(
                room.attended_CN, packed_4[1], adapters_43[1], scale, widths[1], room.delta_CN, room, count, matrix,
                threads,
            )  # fmt: skip
            _meet(threads)
            for row in range(first, behind):
                _add(x_TH[start + row], room.delta_CN[row, :hidden], weights.residual)
                weight_H = norms_N[hidden : 2 * hidden]
                _normalise(x_TH[start + row], weight_H, weights.eps, sizes.norm, room.normed_CH[row])
            _meet(threads)
            project(
                room.normed_CH, packed_4[2], adapters_43[2], scale, widths[2], room.gate_up_CN, room, count, matrix,
                threads,
            )  # fmt: skip
            _meet(threads)
            for row in range(first, behind):
                _gated(room.gate_up_CN[row], sizes.activation, room.gated_CI[row, : sizes.intermediate])
            _meet(threads)
            project(
                room.gated_CI, packed_4[3], adapters_43[3], scale, widths[3], room.delta_CN, room, count, matrix,
                threads,
            )  # fmt: skip
            _meet(threads)
        for row in range(count * part // parts, count * (part + 1) // parts):
            _add(x_TH[start + row], room.delta_CN[row, :hidden], weights.residual)
            _normalise(x_TH[start + row], weights.last_norm_H, weights.eps, sizes.norm, out_RH[done + row])
        done += count
        _meet(threads)


@njit(nogil=True, error_model="numpy")
def _keep_read(x_TH, attended_CN, read_R, done, start, stop, part):
    """Move the rows that are read to the front of the chunk; their number. The first thread moves."""
    count = 0
    while done + count < len(read_R) and read_R[done + count] < stop:
        row = read_R[done + count]
        if part == 0 and row != start + count:
            x_TH[start + count] = x_TH[row]
            attended_CN[count] = attended_CN[row - start]
        count += 1
    return count
