"""What a step takes, fitted to the engine's own steps: a floor, a slope per row that grows with the rows, and one per
token of context.

    seconds(N, C) = w0 + w1 N + w2 C + sum over knots q of w_q max(0, N − q),  all w ≥ 0

Steps of about as many rows and as much context stand in one bucket, of which the median of the last ones counts, so
that a step during which the machine did something else moves nothing. Errors are relative. What context takes is told
from steps of much and of little: until there are such, one without any is taken to be as long as that of the least,
for in a rollout of one sample contexts grow as slowly as machines change their pace.

Where a row count was measured and differs from the fit (kernels change with the rows), the fit is scaled to what was
measured there.

Shapes: P points, F features, X row counts asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median, median_low

import numpy as np
from numpy.typing import NDArray

from plait.kernels import draft_choice
from plait.speculation.pool import FloatArray

Step = tuple[int, int, float]
"""Rows, tokens of context and seconds of a step."""
KNOTS = (2, 4, 8, 16, 32, 64, 128, 256)
LAST = 15
"""Steps of a bucket, or other times, that are remembered."""
MOST_BUCKETS = 96
REFIT = 16
"""Steps after which the fit is made anew; of the first ones each power of two, and each of another number of
rows."""
REFIT_LATER = 64
"""Once so many buckets' worth of steps are known that few more move it."""
MANY = 256
"""Steps from which on that is so."""
WITHOUT = 1.0
"""Weight of what a step without context is taken to take; that of a bucket that is well known is two."""
FAR = 1e9
"""Rows beyond all that are asked for: behind the last knot the fit goes on in a line."""


class Typical:
    """What something takes: the median of the last times, so that the first one, for which something is loaded, moves
    nothing for long."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=LAST)
        self.seconds = 0.0
        """0 before the first time."""

    @property
    def last(self) -> tuple[float, ...]:
        """The last times, the newest last."""
        return tuple(self._last)

    def recall(self, last: Iterable[float]) -> None:
        """These were the last times."""
        self._last = deque(last, maxlen=LAST)
        self._settle()

    def doubt(self) -> None:
        """The longest of the last times may have been a chance: forget it."""
        if self._last:
            self._last.remove(max(self._last))
            self._settle()

    def took(self, seconds: float) -> None:
        """It took so long this time."""
        self._last.append(seconds)
        self._settle()

    def _settle(self) -> None:
        self.seconds = sorted(self._last)[(len(self._last) - 1) // 2] if self._last else 0.0


class StepCost:
    """Seconds of a step that computes so many rows over so much context."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[int, int], deque[Step]] = {}
        """The one that was added to last stands last."""
        self._medians: dict[tuple[int, int], tuple[float, float, float]] = {}
        """Medians of the buckets that nothing was added to since."""
        self._lines: tuple[FloatArray, FloatArray] = (np.array([0.0, FAR]), np.zeros(2))
        """Row counts between which the fit without context is a line, and its seconds there."""
        self._token_s = 0.0
        self._scales: tuple[FloatArray, FloatArray] = (np.zeros(1), np.ones(1))
        """Logarithms of measured row counts, and what the fit is multiplied by there."""
        self._rows_F = np.ones(1)
        """The measured row counts themselves."""
        self._seen: set[int] = set()
        """Rows of all buckets: of new ones it is known at once what they take."""
        self._fresh = 0
        self.num_steps = 0

    def observe(self, num_rows: int, num_context: int, seconds: float) -> None:
        """A step took so long."""
        key = _key(num_rows, num_context)
        is_new = key[0] not in self._seen
        self._seen.add(key[0])
        bucket = self._buckets.pop(key, None)
        self._buckets[key] = bucket = deque(maxlen=LAST) if bucket is None else bucket
        bucket.append((num_rows, num_context, seconds))
        self._medians.pop(key, None)
        if len(self._buckets) > MOST_BUCKETS:
            oldest = next(iter(self._buckets))
            del self._buckets[oldest]
            self._medians.pop(oldest, None)
            self._seen = {rows for rows, _ in self._buckets}
        self._fresh += 1
        self.num_steps += 1
        is_early = is_new or (self.num_steps <= REFIT and self.num_steps & (self.num_steps - 1) == 0)
        if is_early or self._fresh >= (REFIT if self.num_steps < MANY else REFIT_LATER):
            self._fit()
            self._fresh = 0

    def is_measured(self, num_rows: int) -> bool:
        """Whether a step of about so many rows is remembered."""
        return _bucket(num_rows) in self._seen

    def settle(self) -> None:
        """Let what is said of steps follow from all that were seen, the last ones too."""
        if self._fresh:
            self._fit()
            self._fresh = 0

    @property
    def buckets(self) -> tuple[tuple[Step, ...], ...]:
        """The last steps of each bucket; the one that was added to last stands last."""
        return tuple(map(tuple, self._buckets.values()))

    def recall(self, buckets: Iterable[Sequence[Step]], num_steps: int) -> None:
        """These were the last of so many steps; see `buckets`."""
        self._buckets = {_key(*bucket[0][:2]): deque(bucket, maxlen=LAST) for bucket in buckets}
        self._medians.clear()
        self._seen = {rows for rows, _ in self._buckets}
        self.num_steps, self._fresh = num_steps, 0
        if self._buckets:
            self._fit()

    def seconds(self, num_rows_X: NDArray, num_context: float) -> FloatArray:
        """[X], of row counts of at least 1; zeros before the first step."""
        seconds_X = np.empty(len(num_rows_X))
        context_s = self._token_s * float(num_context)
        draft_choice.step_seconds(np.asarray(num_rows_X, float), context_s, *self._lines, *self._scales, seconds_X)
        return seconds_X

    def most(self, num_rows_X: NDArray, num_context: float) -> FloatArray:
        """[X]: what such steps may take at most, as far as row counts near these were measured; see `seconds`."""
        seconds_X = np.empty(len(num_rows_X))
        context_s = self._token_s * float(num_context)
        rows_X = np.asarray(num_rows_X, float)
        draft_choice.most_seconds(rows_X, context_s, *self._lines, *self._scales, self._rows_F, seconds_X)
        return seconds_X

    def of(self, num_rows: int, num_context: float) -> float:
        """Seconds of one step; see `seconds`."""
        context_s = self._token_s * float(num_context)
        return draft_choice.seconds_of(float(num_rows), context_s, *self._lines, *self._scales)

    def _fit(self) -> None:
        for key in self._buckets.keys() - self._medians.keys():
            rows, context, seconds = zip(*self._buckets[key], strict=True)
            self._medians[key] = median(rows), median(context), median_low(seconds)
        medians_P3 = np.array([self._medians[key] for key in self._buckets])
        rows_P, context_P, seconds_P = medians_P3.T
        features_PF = _features(rows_P, context_P)
        # Buckets of few steps count less: their medians may be those of a busy moment.
        trust_P = np.sqrt([min(len(bucket), 5) for bucket in self._buckets.values()])
        least = int(context_P.argmin())
        without_F = _features(rows_P[least : least + 1], np.zeros(1))[0]
        features_PF, aims_P = np.vstack([features_PF, without_F]), np.append(seconds_P, seconds_P[least])
        trust_P = np.append(trust_P, WITHOUT)
        weights_F = non_negative_fit(features_PF * (trust_P / aims_P)[:, None], trust_P)
        self._lines = _lines(weights_F, rows_P.max())
        self._token_s = float(weights_F[2])
        ratio_P = seconds_P / np.maximum(features_PF[:-1] @ weights_F, 1e-12)
        near = rows_P.round().astype(int)
        counts = sorted(set(near.tolist()))
        scales = [float(np.clip(np.median(ratio_P[near == count]), 0.7, 1.4)) for count in counts]
        self._rows_F = np.array(counts, float)
        self._scales = np.log(self._rows_F), np.array(scales)


def _key(num_rows: int, num_context: int) -> tuple[int, int]:
    """The bucket of a step: of about as many rows, and as much context."""
    return _bucket(num_rows), num_context.bit_length()


def _bucket(num_rows: int) -> int:
    """Each count up to 16, then eight buckets between a power of two and the next: what a few rows more take is not
    known of a median over steps with drafts and without."""
    if num_rows <= 16:
        return num_rows
    shift = num_rows.bit_length() - 4
    return (shift << 4) + (num_rows >> shift) + 16


def _lines(weights_F: FloatArray, most_rows: float) -> tuple[FloatArray, FloatArray]:
    """Ends of the lines of a fit, and its seconds there, without context. Of more rows than were measured each takes no
    longer than in the largest step: where kernels take rows by eights, the ninth says nothing of the tenth."""
    ends_E = np.array([0.0, *KNOTS, FAR])
    lines_E = _features(ends_E, np.zeros(len(ends_E))) @ weights_F
    inner = ends_E < most_rows
    end_s = float(_features(np.array([most_rows]), np.zeros(1))[0] @ weights_F)
    row_s = end_s / most_rows
    if lines_E[-1] <= row_s * FAR:
        return ends_E, lines_E
    return np.array([*ends_E[inner], most_rows, FAR]), np.array([*lines_E[inner], end_s, row_s * FAR])


def _features(num_rows_P: NDArray, num_context_P: NDArray) -> FloatArray:
    beyond = np.maximum(num_rows_P[:, None] - np.array(KNOTS), 0)
    return np.column_stack([np.ones(len(num_rows_P)), num_rows_P, num_context_P, beyond]).astype(float)


def non_negative_fit(a_PF: FloatArray, b_P: FloatArray) -> FloatArray:
    """The x ≥ 0 with the least |a x − b| (Lawson and Hanson, "Solving least squares problems", 1974, chapter 23)."""
    scale_F = np.maximum(np.sqrt((a_PF**2).sum(0)), 1e-30)
    a_PF = a_PF / scale_F
    num_features = a_PF.shape[1]
    x_F, free = np.zeros(num_features), np.zeros(num_features, bool)
    for _ in range(3 * num_features):
        gradient_F = a_PF.T @ (b_P - a_PF @ x_F)
        gradient_F[free] = -np.inf
        best = int(gradient_F.argmax())
        if gradient_F[best] <= 1e-9:
            break
        free[best] = True
        while True:
            solved = np.linalg.lstsq(a_PF[:, free], b_P, rcond=None)[0]
            if (solved > 0).all():
                x_F[:] = 0
                x_F[free] = solved
                break
            now = x_F[free]
            falling = solved <= 0
            share = (now[falling] / np.maximum(now[falling] - solved[falling], 1e-30)).min()
            x_F[free] = now + share * (solved - now)
            free &= x_F > 1e-12
            x_F[~free] = 0
            if not free.any():
                break
    return x_F / scale_F
