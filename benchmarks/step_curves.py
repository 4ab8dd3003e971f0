"""Seconds of a decode step by its rows, for benchmarks that count what other steps would come to."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class StepCurve:
    """Lines through measured points, the first and the last of which go on.

    Args:
        rows, ms: of the points, by rows; two at least.
    """

    name: str
    rows: tuple[float, ...]
    ms: tuple[float, ...]

    def __call__(self, num_rows: ArrayLike) -> NDArray[np.float64]:
        """Seconds of steps of so many rows, any shape."""
        count, rows, ms = np.asarray(num_rows, float), np.array(self.rows), np.array(self.ms)
        segment = np.clip(np.searchsorted(rows, count) - 1, 0, len(rows) - 2)
        slope = np.diff(ms) / np.diff(rows)
        return (ms[segment] + slope[segment] * (count - rows[segment])) / 1e3

    def __str__(self) -> str:
        points = ", ".join(f"{ms:g} of {rows:g}" for rows, ms in zip(self.rows, self.ms, strict=True))
        return f"{self.name}: {points} ms"


EPYC = StepCurve("one core of an EPYC, 135M", (1, 8, 32), (9.0, 10.5, 27.0))
XEON = StepCurve("one core of a Xeon with AMX, 135M", (8, 32), (17.8, 26.0))
"""As measured for SmolLM2-135M in bfloat16 (README.md); below 8 rows the line of the Xeon is drawn on."""
H200 = StepCurve("one H200, 8B", (1, 257), (4.397, 16.429))
"""As computed from its bandwidth."""


def curve(text: str) -> StepCurve:
    """An option's value: NAME=ROWS:MS,ROWS:MS…

    Raises:
        ArgumentTypeError: it is not, or rows do not rise.
    """
    name, _, points = text.partition("=")
    if not re.fullmatch(r"(\d+(\.\d+)?:\d+(\.\d+)?,)+\d+(\.\d+)?:\d+(\.\d+)?", points):
        raise argparse.ArgumentTypeError(f"expected NAME=ROWS:MS,ROWS:MS… of two points at least, found `{text}`")
    rows, ms = zip(*(map(float, point.split(":")) for point in points.split(",")), strict=True)
    if list(rows) != sorted(set(rows)):
        raise argparse.ArgumentTypeError(f"expected more rows from point to point, found `{text}`")
    return StepCurve(name, rows, ms)
