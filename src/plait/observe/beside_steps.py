"""Seconds that a run spends on what is no stage of a step: evaluations, saving; and on compiling, wherever it falls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

STAGE_SECONDS = "timing_s/"
"""Every metric that begins so is a stage's busy seconds; `timing_s/step` is the whole step and left out."""
_SHOWN_S = 0.05
NONE_BESIDE: Mapping[str, float] = MappingProxyType({})
COMPILING = "compiling"
"""Not a part beside others: a share of the stages and parts in which something was compiled."""


def _compiled_s() -> float:
    """Seconds that kernels have taken to compile in this process."""
    from plait.compiled import ANNOUNCEMENT

    return ANNOUNCEMENT.taken_s


class BesideSteps:
    """Counts them from `take` to `take`.

    Args:
        clock: seconds.
        compiled_s: seconds that this process has compiled kernels for so far.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        compiled_s: Callable[[], float] = _compiled_s,
    ) -> None:
        self._clock = clock
        self._compiled_s = compiled_s
        self._parts: dict[str, float] = {}
        self._once_s = 0.0
        self._compiled_before_s = compiled_s()

    @contextmanager
    def part(self, name: str, *, once: bool = False) -> Iterator[None]:
        """What is done inside is a part of this name.

        Args:
            once: other steps will have none.
        """
        began_s, compiled_before_s = self._clock(), self._compiled_s()
        try:
            yield
        finally:
            took_s = self._clock() - began_s
            self._parts[name] = self._parts.get(name, 0.0) + took_s
            if once:
                self._once_s += took_s - (self._compiled_s() - compiled_before_s)

    def take(self) -> tuple[dict[str, float], float]:
        """Seconds of each part, and of COMPILING, since the last call; and how many of all these come only once."""
        compiled_s = self._compiled_s()
        compiling_s = compiled_s - self._compiled_before_s
        parts, once_s = self._parts | {COMPILING: compiling_s}, self._once_s + compiling_s
        self._parts, self._once_s, self._compiled_before_s = {}, 0.0, compiled_s
        return parts, once_s


def stage_text(metrics: Mapping[str, Any], beside: Mapping[str, float]) -> str:
    """Seconds of each stage of a step, and of what is done beside them (`BesideSteps.take`); how many of all these
    compiled is said last."""
    prefix = STAGE_SECONDS
    stages = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
    stages.pop("step", None)
    least = min(_SHOWN_S, max(stages.values(), default=0.0))  # what takes no time is no stage to watch
    stages = {name: seconds for name, seconds in stages.items() if seconds >= least}
    stages |= {name: seconds for name, seconds in beside.items() if name != COMPILING and seconds >= _SHOWN_S}
    text = ", ".join(f"{name} {float(value):.1f}" for name, value in stages.items())
    compiling_s = beside.get(COMPILING, 0.0)
    return f"{text}; of it {COMPILING} {compiling_s:.1f}" if compiling_s >= _SHOWN_S else text
