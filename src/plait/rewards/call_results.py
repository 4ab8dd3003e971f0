"""What a call of a reward function gave: its scores, checked, and what it logged beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
        number = as_number(listed(value))
        if number is None or not math.isfinite(number):
            raise ValueError(f"log_metric({name!r}, …): expected a finite number, found {_kind(value)}")
        self.metrics.setdefault(name, []).append(number)


def check_scores(result: Any, turns: Sequence[int]) -> dict[str, Any]:
    """{"scores", "by_turn", "faults"} of what a function returned, or {"error"} when no place can be blamed.

    `scores` has a finite number or None for each sample; `by_turn` has the numbers that a score is the sum of, for each
    place where there is one for each turn; `faults` says, for each place that has neither, what it has.

    Args:
        turns: of each sample, how many it has.
    """
    count = len(turns)
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__len__") or not hasattr(result, "__getitem__"):
        wanted = "one number for each sample, here one" if count == 1 else f"a number for each of {count} samples"
        return {"error": f"returned {_kind(result)}, expected a list with {wanted}", "miscounted": True}
    if len(result) != count:
        return {"error": f"returned {len(result)} scores for {count} samples", "miscounted": True}
    scores: list[float | None] = [None] * count
    by_turn: dict[int, list[float]] = {}
    faults: dict[int, str] = {}
    for place, num_turns in enumerate(turns):
        value = result[place]
        try:
            if value is None:
                continue
            if as_number(value) is not None or not isinstance(listed(value), list | tuple):
                scores[place] = _finite(value)
            else:
                given = _of_turns(listed(value), num_turns)
                scores[place], by_turn[place] = _sum(given), given
        except _NoScore as fault:
            faults[place] = f"returned {fault}"
    return {"scores": scores, "by_turn": by_turn, "faults": faults}


class _NoScore(ValueError):
    """A value is none; the message says what it is, and what was expected."""


def _of_turns(values: Sequence[Any], num_turns: int) -> list[float]:
    """One number for each turn. Raises _NoScore."""
    if len(values) != num_turns:
        counts = f"{num_turns}, not {len(values)}"
        expected = f"a number or None is expected, or a number for each turn of the sample: {counts}"
        raise _NoScore(f"{_kind(values)} where {expected}")
    given: list[float] = []
    for turn, value in enumerate(values, 1):
        if (number := as_number(value)) is None:
            raise _NoScore(f"{_kind(value)} for turn {turn} where a number is expected")
        if not math.isfinite(number):
            raise _NoScore(f"{number} for turn {turn}, which is no score")
        given.append(number)
    return given


def _sum(given: Sequence[float]) -> float:
    """Raises _NoScore where it is beyond all floats."""
    try:
        return math.fsum(given)
    except OverflowError:
        raise _NoScore(f"{_kind(given)}, whose sum is no finite number") from None


def _finite(value: Any) -> float:
    """Raises _NoScore."""
    number = as_number(value)
    if number is None:
        raise _NoScore(f"{_kind(value)} where a number or None is expected")
    if not math.isfinite(number):
        raise _NoScore(f"{number}, which is no score; return None where the function does not apply")
    return number


def as_number(value: Any) -> float | None:
    """A value as a number; None: it is none."""
    if isinstance(value, str | bytes):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor of several numbers: RuntimeError
        return None


def _kind(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {value!r:.60}"
