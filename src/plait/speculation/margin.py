"""How much drafts may lose: so little that no WINDOW steps are slower than plain decoding by more than a share.

What a step loses is what it takes beyond the plain steps for the same tokens; less than nothing, where drafts
were accepted. Before anything is spent, its whole price must be covered in every window of steps that it will lie in:
those that reach back, by what they have left, and those that begin with it, by plain steps to come. Nothing is left at
first, so what may be spent grows with the steps.

Shapes: W windows, by the steps that they reach back: 0 … WINDOW − 1.
"""

from __future__ import annotations

import numpy as np

from plait.kernels import draft_choice
from plait.speculation.pool import FloatArray
from plait.speculation.promise import MAY_LOSE, WINDOW

SPENT = 0.95
"""Share of what may be lost that is spent, as prices are estimates."""


class Margin:
    """What the last steps took and lost.

    Args:
        may_lose: share of the time of any WINDOW steps that drafts may lose.
    """

    def __init__(self, may_lose: float = MAY_LOSE) -> None:
        self.most_lost = SPENT * may_lose
        """Share that is spent."""
        self._steps_W2 = np.zeros((WINDOW - 1, 2))
        """What each took and lost, in a ring."""
        self._newest = 0

    @property
    def steps_W2(self) -> FloatArray:
        """What each of the last WINDOW - 1 steps took and lost, the newest last."""
        return np.roll(self._steps_W2, -1 - self._newest, axis=0)

    def recall(self, steps_W2: FloatArray) -> None:
        """These were the last steps; see `steps_W2`."""
        self._steps_W2[:] = steps_W2
        self._newest = len(self._steps_W2) - 1

    def done(self, seconds: float, lost_s: float) -> None:
        """A step took so long, and lost so much of it."""
        self._newest = (self._newest + 1) % len(self._steps_W2)
        self._steps_W2[self._newest] = seconds, lost_s

    def room_s(self, plain_s: float, *, once_s: float = 0.0) -> float:
        """The largest price that is covered.

        Args:
            plain_s: of a plain step, now and after it.
            once_s: that is lost beside.
        """
        return draft_choice.room(self._steps_W2, self._newest, self.most_lost, plain_s, once_s)
