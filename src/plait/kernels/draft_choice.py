"""Which guesses of a batch are computed, in one call: of so few numbers arrays would take longer than the arithmetic,
cold as they are behind a step. What is decided, and why, is in `speculation.choice`.

Imports no torch. Shapes: B samples, K tokens of a guess, M guessed tokens, the likeliest first, S sources, X row
counts, E ends of lines, F measured row counts, W steps of a window."""

from __future__ import annotations

import math

import numpy as np

from plait.compiled import njit
from plait.kernels.draft_lookup import CELLS, NUM_SOURCES

_PER_SOURCE = CELLS[2] * CELLS[3] * CELLS[4]


@njit(nogil=True, error_model="numpy")
def _on_lines(x, xs, ys):
    """Lines through points; constant before the first and behind the last."""
    last = len(xs) - 1
    if x <= xs[0]:
        return ys[0]
    if x >= xs[last]:
        return ys[last]
    place = 0
    while xs[place + 1] <= x:
        place += 1
    return (ys[place + 1] - ys[place]) / (xs[place + 1] - xs[place]) * (x - xs[place]) + ys[place]


@njit(nogil=True, error_model="numpy")
def seconds_of(rows, context_s, ends_E, lines_E, log_rows_F, scales_F):
    """What a step of so many rows takes; see `step_seconds`."""
    fitted_s = _on_lines(rows, ends_E, lines_E) + context_s
    return fitted_s * _on_lines(math.log(rows), log_rows_F, scales_F)


@njit(nogil=True, error_model="numpy")
def step_seconds(rows_X, context_s, ends_E, lines_E, log_rows_F, scales_F, seconds_X):
    """What steps of so many rows take; the last argument is written.

    Args:
        context_s: what their context adds.
        ends_E, lines_E: rows between which the fit is a line, and its seconds there.
        log_rows_F, scales_F: logarithms of measured row counts, and what the fit is multiplied by there.
    """
    for i in range(len(rows_X)):
        seconds_X[i] = seconds_of(rows_X[i], context_s, ends_E, lines_E, log_rows_F, scales_F)


@njit(nogil=True, error_model="numpy")
def _rank(survival_BK, lengths_B, samples_M, places_M, survival_M):
    """All guessed tokens, the likeliest first, of equals those that stand earlier in their guess; the last three
    arguments are written."""
    num_samples, most = survival_BK.shape
    unlikely_M, at = np.empty(len(samples_M)), 0
    flat_M = np.empty(len(samples_M), np.int64)
    for place in range(most):
        for row in range(num_samples):
            if place < lengths_B[row]:
                unlikely_M[at], flat_M[at] = -survival_BK[row, place], place * num_samples + row
                at += 1
    order_M = np.argsort(unlikely_M, kind="mergesort")
    for at in range(len(order_M)):
        flat = flat_M[order_M[at]]
        samples_M[at], places_M[at] = flat % num_samples, flat // num_samples
        survival_M[at] = -unlikely_M[order_M[at]]


@njit(nogil=True, error_model="numpy")
def _sure(known_BK, samples_M, places_M, spreads, sure_M1):
    """What the first 0 … M guesses are sure to come to; the last argument is written.

    Args:
        known_BK: survival, as far as it is known.
        spreads: standard deviations that are taken off.
    """
    sum_known, variance = 0.0, 0.0
    sure_M1[0] = 0.0
    for at in range(len(samples_M)):
        row, place = samples_M[at], places_M[at]
        known, before = known_BK[row, place], 0.0
        for earlier in range(place):
            before += known_BK[row, earlier]
        # Of the tokens a of one guess that come true, E[a²] is the sum of (2 place + 1) survival.
        variance += (2 * place + 1) * known - known * (2 * before + known)
        sum_known += known
        sure_M1[at + 1] = max(sum_known - spreads * math.sqrt(max(variance, 0.0)), 0.0)


@njit(nogil=True, error_model="numpy")
def _most_per_second(survival_M, seconds_M1, num_samples, allowed_M1):
    """(m ≤ M with the most expected tokens per second of those that are allowed, that against none, the most of all
    against none); of equals the least m."""
    tokens, best, best_gain, most_gain = float(num_samples), 0, 1.0, 1.0
    plain = tokens / max(seconds_M1[0], 1e-12)
    for at in range(len(survival_M)):
        tokens += survival_M[at]
        gain = tokens / max(seconds_M1[at + 1], 1e-12) / plain
        most_gain = max(most_gain, gain)
        if allowed_M1[at + 1] and gain > best_gain:
            best, best_gain = at + 1, gain
    return best, best_gain, most_gain


@njit(nogil=True, error_model="numpy")
def choose(
    survival_BK, lengths_B, cells_BK, known_S, seconds_M1, spreads, room_s, more_s, samples_M, allowed_M1
):  # fmt: skip
    """Weigh all guesses at once; the last two arguments are written: the sample of each guess, the likeliest first, and
    how many of them may be computed.

    Args:
        known_S: how much is known of each source.
        seconds_M1: of steps with the first 0 … M guesses.
        spreads: see `_sure`.
        room_s: the largest price that the margin covers (`speculation.margin`).
        more_s: that every step takes beside.

    Returns:
        As `_most_per_second`; and the least price: what guesses are sure to gain is less than nothing.
    """
    num_samples, num_tokens = len(lengths_B), len(samples_M)
    places_M, survival_M = np.empty(num_tokens, np.int64), np.empty(num_tokens)
    _rank(survival_BK, lengths_B, samples_M, places_M, survival_M)
    known_BK = np.empty(survival_BK.shape)
    for row in range(num_samples):
        for place in range(survival_BK.shape[1]):
            source = cells_BK[row, place] // _PER_SOURCE % NUM_SOURCES
            known_BK[row, place] = survival_BK[row, place] * known_S[source]
    sure_M1, with_more_M1 = np.empty(num_tokens + 1), np.empty(num_tokens + 1)
    _sure(known_BK, samples_M, places_M, spreads, sure_M1)
    plain_s, least_price_s = seconds_M1[0], np.inf
    for at in range(num_tokens + 1):
        price_s, sure_s = seconds_M1[at] - plain_s, sure_M1[at] * plain_s / num_samples
        price_s = price_s - sure_s if sure_s > price_s else price_s
        least_price_s = min(least_price_s, price_s)
        allowed_M1[at] = price_s <= 0 or price_s <= room_s
        with_more_M1[at] = seconds_M1[at] + more_s
    best, gain, most_gain = _most_per_second(survival_M, with_more_M1, num_samples, allowed_M1)
    return best, gain, most_gain, least_price_s


@njit(nogil=True, error_model="numpy")
def room(steps_W2, newest, most_lost, plain_s, once_s, again, kept):
    """The largest price that all windows have room for; and the largest, if it is paid `again` times in those that have
    as many steps to come.

    Args:
        steps_W2: what each step took and lost, in a ring, the oldest behind the newest.
        newest: the place of the newest.
        kept: share of the steps to come that is set aside.
    """
    room_s = room_again_s = np.inf
    num, taken_s, lost_s = len(steps_W2), 0.0, once_s
    for back in range(num + 1):
        if back > 0:
            step = (newest - back + 1) % num
            taken_s, lost_s = taken_s + steps_W2[step, 0], lost_s + steps_W2[step, 1]
        steps = num + 1 - back
        left_s = most_lost * (taken_s + steps * plain_s) - lost_s - (steps - 1) * kept * plain_s
        room_s, room_again_s = min(room_s, left_s), min(room_again_s, left_s / min(steps, again))
    return room_s, room_again_s
