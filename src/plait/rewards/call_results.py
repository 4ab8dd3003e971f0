"""What a call of a reward function gave: its scores, checked, and what it logged beside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from plait.metric_names import problem_of
from plait.rewards.signature import Miscounted, listed


class Logged:
    """What a function logs in one call."""

    def __init__(self) -> None:
        self.extras: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    @property
    def functions(self) -> dict[str, Callable[..., None]]:
        """`log_extra` and `log_metric`, as functions ask for them."""
        return {"log_extra": self._extra, "log_metric": self._metric}

    def check(self, num_samples: int) -> None:
        """Raises Miscounted where a column has another number of values than there are samples."""
        for column, values in self.extras.items():
            if len(values) != num_samples:
                raise Miscounted(f"log_extra({column!r}) gave {len(values)} values for {num_samples} samples")

    def _extra(self, column: str, values: Any) -> None:
        """Raises TypeError: there are no values, one per sample."""
        if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
            raise TypeError(
                f"log_extra({column!r}, …): expected a list with one value per sample, found {_kind(values)}"
            )
        self.extras[str(column)] = [listed(values_of_sample) for values_of_sample in values]

    def _metric(self, name: str, value: Any) -> None:
        """Raises ValueError: the name is none of a metric, or the value is no finite number."""
        if (problem := problem_of(name)) is not None:
            raise ValueError(f"log_metric: {problem}")
        number = _number(listed(value))
        if number is None or not math.isfinite(number):
            raise ValueError(f"log_metric({name!r}, …): expected a finite number, found {_kind(value)}")
        self.metrics.setdefault(name, []).append(number)


def check_scores(result: Any, num_samples: int) -> dict[str, Any]:
    """{"scores", "faults"} of what a function returned, or {"error"} when no place can be blamed.

    `scores` has a finite number or None for each sample; `faults` says, for each place that has neither, what it has.
    """
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__len__") or not hasattr(result, "__getitem__"):
        return {"error": f"returned {_kind(result)}, expected a list of {num_samples} numbers", "miscounted": True}
    if len(result) != num_samples:
        return {"error": f"returned {len(result)} scores for {num_samples} samples", "miscounted": True}
    scores: list[float | None] = []
    faults: dict[int, str] = {}
    for place in range(num_samples):
        value = result[place]
        scores.append(None)
        if value is None:
            continue
        number = _number(value)
        if number is None:
            faults[place] = f"returned {_kind(value)} where a number or None is expected"
            continue
        if math.isfinite(number):
            scores[place] = number
        else:
            faults[place] = f"returned {number}, which is no score; return None where the function does not apply"
    return {"scores": scores, "faults": faults}


def _number(value: Any) -> float | None:
    """A value as a number; None: it is none."""
    if isinstance(value, str | bytes):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor of several numbers: RuntimeError
        return None


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}"
