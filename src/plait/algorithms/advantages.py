"""What advantages are made of. NumPy float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

FloatArray = np.ndarray[Any, np.dtype[np.float64]]


def standardised(values: FloatArray, epsilon: float) -> FloatArray:
    """(x − mean x) / (std x + ε), the sample standard deviation (ddof 1).

    Exactly 0 for a single value and for equal ones: a mean of equal numbers may differ from them in the last bit.
    """
    if len(values) < 2 or np.ptp(values) == 0:
        return np.zeros_like(values)
    return (values - values.mean()) / (values.std(ddof=1) + epsilon)


def centred(values: FloatArray) -> FloatArray:
    """x − mean x; exactly 0 for a single value and for equal ones."""
    return np.zeros_like(values) if np.ptp(values) == 0 else values - values.mean()


def whitened(returns: Sequence[FloatArray]) -> list[FloatArray]:
    """A_t = (G_t − mean G) / (std G + 1e-8) over all response tokens of the batch, whatever sample they belong to.

    One array per sample in and out. All are 0 where every return is the same.
    """
    ends = np.cumsum([len(part) for part in returns])[:-1]
    return list(np.split(standardised(np.concatenate(list(returns)), 1e-8), ends))
