"""Seconds that a run spends on what is no stage of a step: evaluations, saving; and on compiling, wherever it falls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from plait.compiled import ANNOUNCEMENT

COMPILING = "compiling"
"""Not a part beside others: a share of the stages and parts in which something was compiled."""


class BesideSteps:
    """Counts them from `take` to `take`.

    Args:
        clock: seconds.
        compiled_s: seconds that this process has compiled kernels for so far.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        compiled_s: Callable[[], float] = lambda: ANNOUNCEMENT.taken_s,
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
