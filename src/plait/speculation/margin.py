"""How much guesses may lose: so little that no WINDOW steps are slower than plain decoding by more than a share.

What a step loses is what it takes beyond the plain steps for the same tokens; less than nothing, where guesses came
true. Before anything is spent, its whole price must be covered in every window of steps that it will lie in: those that
reach back, by what they have left, and those that begin with it, by plain steps to come. Nothing is left at first, so
what may be spent grows with the steps.

Shapes: W windows, by the steps that they reach back: 0 … WINDOW − 1; X prices.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from plait.speculation.pool import FloatArray

WINDOW = 32
"""Steps of which none may be slower together."""
MOST_LOST = 0.019
"""Share of their time that they may lose: a little less than the two percent that are promised, as prices are
estimates."""
LAST = 0.1
"""Weight of the last step in what steps take by themselves."""


class Margin:
    """What the last steps took and lost."""

    def __init__(self) -> None:
        self._taken_W, self._lost_W = np.zeros(WINDOW), np.zeros(WINDOW)
        """Sums of the last 0 … WINDOW − 1 steps."""
        self._upkeep_s = 0.0

    def done(self, seconds: float, lost_s: float, upkeep_s: float = 0.0) -> None:
        """A step took so long, and lost so much of it.

        Args:
            upkeep_s: of that, what the next steps are expected to lose as well.
        """
        self._upkeep_s += LAST * (upkeep_s - self._upkeep_s)
        for sums_W, value in ((self._taken_W, seconds), (self._lost_W, lost_s)):
            sums_W[1:] = sums_W[:-1] + value

    def covers(
        self, prices_X: FloatArray, plain_s: float, *, once_s: float = 0.0, again: int = 1, upkeep_s: float | None = 0.0
    ) -> NDArray[np.bool_]:
        """[X]: whether a step may lose so much, beside the upkeep of the steps after it.

        Args:
            prices_X: seconds that may be lost; less than nothing is what is sure to be gained.
            plain_s: of a plain step, now and after it.
            once_s: that is lost beside.
            again: as many steps after it, itself included, are sure to gain as much, where it does.
            upkeep_s: what the steps after it will lose as well, at least; None: it is upkeep that is asked about.
        """
        steps_W = WINDOW - np.arange(WINDOW)
        room_W = MOST_LOST * (self._taken_W + steps_W * plain_s) - self._lost_W - once_s
        if upkeep_s is not None:
            room_W = room_W - (steps_W - 1) * max(upkeep_s, self._upkeep_s)
        times_W = np.minimum(steps_W, again)
        return (prices_X[:, None] * np.where(prices_X[:, None] < 0, times_W, 1) <= room_W).all(1)
