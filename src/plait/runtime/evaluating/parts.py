"""What each function and each model of a reward gave answers, before weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

OF_REWARDS = ("rewards/", "costs/")
"""With what a record of a sample begins the names of what functions and models gave it."""


def parts_of(extras: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, ...]]:
    """`rewards/NAME` of each function and each model of the reward, and `costs/NAME` of the cost → its scores, item by
    item; NaN where it gave none.

    Args:
        extras: `Evaluation.extras`.
    """
    names = [name for name in (extras[0] if extras else ()) if name.startswith(OF_REWARDS)]
    return {name: tuple(_number(extra.get(name)) for extra in extras) for name in names}


def _number(score: float | None) -> float:
    return math.nan if score is None else float(score)
