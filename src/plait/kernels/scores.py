"""What a row of scores becomes: capped, masked, a softmax. For attention by vectors and by the matrix unit.

Shapes: T rows (new tokens), K keys.
"""

from __future__ import annotations

import numpy as np

from plait.compiled import AVAILABLE, njit

if AVAILABLE:
    from plait.kernels.attention_intrinsics import KEYS
    from plait.kernels.row_intrinsics import softmax_of_row
    from plait.kernels.scalar_intrinsics import exp, larger, narrow, of_ordered, ordered
else:
    KEYS = 16

_ZERO, _ONE, LOWEST = np.float32(0), np.float32(1), np.float32(-np.inf)


@njit(nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"}, forceinline=True)
def softmax(scores_K, probs_K, sink):
    most = ordered(sink)
    for k in range(len(scores_K)):
        most = larger(most, ordered(scores_K[k]))
    top = of_ordered(most)
    total = exp(sink - top)
    for k in range(len(scores_K)):
        weight = exp(scores_K[k] - top)
        scores_K[k] = weight
        total += weight
    inverse = _ONE / total
    for k in range(len(scores_K)):
        probs_K[k] = narrow(probs_K, scores_K[k] * inverse)


@njit(nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"}, forceinline=True)
def cap(scores_K, softcap):
    """Scores become softcap · tanh(score / softcap)."""
    slope = np.float32(-2) / softcap
    for k in range(len(scores_K)):
        small = exp(np.abs(scores_K[k]) * slope)
        scores_K[k] = np.copysign(softcap * ((_ONE - small) / (_ONE + small)), scores_K[k])


@njit(nogil=True, error_model="numpy", forceinline=True)
def seen_blocks(held, new, depth, window):
    """(first, stop): the blocks of a sample that a row looks at.

    Args:
        held: tokens that the sample held before the step.
        new: number of the row among the sample's rows.
        depth: of the row in the tree of these; equal to `new` in a chain.
        window: 0 for none.
    """
    first = max(0, held + depth - window + 1) if window > 0 else 0
    return first // KEYS, (held + new + KEYS) // KEYS


@njit(nogil=True, error_model="numpy", forceinline=True)
def to_shares(like, vectors, scores_K, probs_K, scale, row, first_row, held, seen_TK, depths_T, window, softcap, sink):
    """Turn the scores of a row into its shares of the values.

    Args:
        vectors: whether the CPU has them for the dtype of `like`.
        scores_K: float32, of all keys in the blocks of `seen_blocks`.
        scale: float32 by which they are multiplied first.
        row, first_row: numbers of the row and of the first row of its sample.
        seen_TK, depths_T: see `paged_attention.attend`.
        sink: float32, −inf for none.
    """
    new = row - first_row
    depth = depths_T[row] if len(seen_TK) else new
    first = max(0, held + depth - window + 1) if window > 0 else 0
    offset = first // KEYS * KEYS
    if softcap > _ZERO:
        for k in range(len(scores_K)):
            scores_K[k] *= scale
        scale = _ONE
        cap(scores_K, softcap)
    scores_K[: first - offset] = LOWEST
    scores_K[held + new + 1 - offset :] = LOWEST
    if len(seen_TK):
        for other in range(new):
            near = window == 0 or depth - depths_T[first_row + other] < window
            if not (near and seen_TK[row, other]) and held + other >= offset:
                scores_K[held + other - offset] = LOWEST
    if vectors:
        softmax_of_row(like, scores_K.ctypes.data, len(scores_K), scale, sink, probs_K.ctypes.data)
    else:
        softmax(scores_K, probs_K, sink)
