"""What advantages are made of. NumPy float64."""

from __future__ import annotations

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
