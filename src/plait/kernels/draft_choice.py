"""Which drafts of a batch are computed, in one call: of so few numbers arrays would take longer than the arithmetic,
cold as they are behind a step. What is decided, and why, is in `speculation.choice`.

Imports no torch. Shapes: B samples, K tokens of a draft, M draft tokens, the likeliest first, X row counts,
E ends of lines, F measured row counts, W steps of a window."""

from __future__ import annotations

import math

import numpy as np

from plait.compiled import njit

STAKED = 2
"""Drafts that later steps are taken to compute of what they find, where little is left to lose."""
WAITED = 26.0
"""Steps without drafts once all of the loss is spent, out of the 32 steps over which it is bounded."""
FEW = 4.0
"""Up to so many rows, most of a step is taken to be independent of their number: it reads the weights."""


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
def most_seconds(rows_X, context_s, ends_E, lines_E, log_rows_F, scales_F, rows_F, seconds_X):
    """What steps of so many rows may take at most, of which fewer and more were measured; the last argument is written.
    No step takes longer than one of more rows, nor longer for a row than one of fewer: it could be several of those.
    Of more than all that were measured it is half way from there to what is fitted. Of less than FEW rows a step is
    taken to grow by no more than of FEW.

    Args:
        rows_F: row counts that were measured, rising.
        context_s, ends_E, lines_E, log_rows_F, scales_F: see `step_seconds`.
    """
    for i in range(len(rows_X)):
        rows, most, above = rows_X[i], np.inf, np.searchsorted(rows_F, rows_X[i])
        fitted_s = seconds_of(rows, context_s, ends_E, lines_E, log_rows_F, scales_F)
        if above < len(rows_F):
            most = seconds_of(rows_F[above], context_s, ends_E, lines_E, log_rows_F, scales_F)
        if above > 0:
            fewer = rows_F[above - 1]
            alone_s = seconds_of(fewer, context_s, ends_E, lines_E, log_rows_F, scales_F)
            more_s = alone_s * (1.0 + (rows - fewer) / max(fewer, FEW))
            most = min(most, more_s if above < len(rows_F) else (more_s + fitted_s) / 2)
        seconds_X[i] = max(most, fitted_s)


@njit(nogil=True, error_model="numpy")
def _rank(survival_BK, lengths_B, samples_M, places_M, survival_M):
    """All draft tokens, the likeliest first, of equals those that stand earlier in their draft; the last three
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
def _most_per_second(survival_M, seconds_M1, num_samples, allowed_M1, gains_M1):
    """(m ≤ M with the most expected tokens per second of those that are allowed, the most of all against none); of
    equals the least m. The last argument is written: tokens per second against none."""
    tokens, best, gains_M1[0] = float(num_samples), 0, 1.0
    plain = tokens / max(seconds_M1[0], 1e-12)
    for at in range(len(survival_M)):
        tokens += survival_M[at]
        gains_M1[at + 1] = tokens / max(seconds_M1[at + 1], 1e-12) / plain
        if allowed_M1[at + 1] and gains_M1[at + 1] > gains_M1[best]:
            best = at + 1
    return best, gains_M1.max()


@njit(nogil=True, error_model="numpy")
def _with_heed(best, survival_M, places_M, seconds_M1, allowed_M1, gains_M1, room_s, look_s):
    """m ≤ best that gains most, when it is heeded what its price leaves for later.

    With chance miss(m) nothing of the first m is accepted, and their price is gone. Later ones, as good as the best of
    these, all come to nothing until x is spent with chance ruin(x) = miss(best) ** (x / (look_s + price(STAKED))); who
    is ruined goes without the gain of the best for WAITED steps. Whatever is accepted gives all of it back. So m draft
    tokens are worth gain(m) + WAITED (gain(best) - 1) (ruin(room) - miss(m) ruin(room - price(m)))."""
    missed, misses_M1 = 1.0, np.ones(best + 1)
    for at in range(best):
        if places_M[at] == 0:
            missed *= 1.0 - survival_M[at]
        misses_M1[at + 1] = missed
    each_s = look_s + seconds_M1[min(STAKED, len(survival_M))] - seconds_M1[0]
    per_s = math.log(max(missed, 1e-12)) / max(each_s, 1e-12)
    ruin, lost = math.exp(per_s * room_s), WAITED * (gains_M1[best] - 1.0)
    chosen, most = 0, 1.0
    for at in range(1, best + 1):
        price_s = seconds_M1[at] - seconds_M1[0]
        worth = gains_M1[at] + lost * (ruin - misses_M1[at] * math.exp(per_s * (room_s - price_s)))
        if allowed_M1[at] and worth > most:
            chosen, most = at, worth
    return chosen


@njit(nogil=True, error_model="numpy")
def choose(survival_BK, lengths_B, seconds_M1, prices_M1, room_s, share, more_s, look_s, samples_M, allowed_M1):
    """Weigh all drafts at once; the last two arguments are written: the sample of each draft, the likeliest first, and
    how many of them may be computed.

    Args:
        seconds_M1: of steps with the first 0 … M draft tokens.
        prices_M1: what these drafts may cost at most, if none is accepted.
        room_s: the largest price that is covered (`speculation.margin`).
        share: of it, that the drafts are expected to cost at most.
        more_s: that every step takes beside.
        look_s: that each of the next drafts takes beside its rows; inf: nothing has to be left for them.

    Returns:
        m ≤ M to be computed, the most expected tokens per second of those that are allowed against none, the most of
        all against none. With less m may be computed for what is left to later steps, so its own tell nothing of
        whether anything should be.
    """
    num_samples, num_tokens = len(lengths_B), len(samples_M)
    places_M, survival_M = np.empty(num_tokens, np.int64), np.empty(num_tokens)
    _rank(survival_BK, lengths_B, samples_M, places_M, survival_M)
    with_more_M1, gains_M1 = np.empty(num_tokens + 1), np.empty(num_tokens + 1)
    for at in range(num_tokens + 1):
        expected_s = seconds_M1[at] - seconds_M1[0]
        allowed_M1[at] = at == 0 or (prices_M1[at] <= room_s and expected_s <= share * room_s)
        with_more_M1[at] = seconds_M1[at] + more_s
    best, most_gain = _most_per_second(survival_M, with_more_M1, num_samples, allowed_M1, gains_M1)
    chosen = best
    if best > 0 and look_s < np.inf:
        chosen = _with_heed(best, survival_M, places_M, seconds_M1, allowed_M1, gains_M1, room_s, look_s)
    return chosen, gains_M1[best], most_gain


@njit(nogil=True, error_model="numpy")
def room(steps_W2, newest, most_lost, plain_s, once_s):
    """The largest price that all windows have room for.

    Args:
        steps_W2: what each step took and lost, in a ring, the oldest behind the newest.
        newest: the place of the newest.
        once_s: that is lost beside.
    """
    room_s = np.inf
    num, taken_s, lost_s = len(steps_W2), 0.0, once_s
    for back in range(num + 1):
        if back > 0:
            step = (newest - back + 1) % num
            taken_s, lost_s = taken_s + steps_W2[step, 0], lost_s + steps_W2[step, 1]
        steps = num + 1 - back
        room_s = min(room_s, most_lost * (taken_s + steps * plain_s) - lost_s)
    return room_s
