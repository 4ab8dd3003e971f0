"""What the forwards of a draft model take, as it is seen when the host waits for what they draw."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from plait.data.host_device import Moment, moment, seconds_between
from plait.speculation.step_cost import StepCost


class DraftSeconds:
    """Seconds of two kinds of forwards: steps, of which each is as a step of decoding is and may be replayed, and
    others, which catch up with what samples have said.

    Args:
        device: of the model.
        capturing_s: seconds in which steps were captured so far. A forward in which one is says nothing.
    """

    def __init__(self, device: torch.device, capturing_s: Callable[[], float]) -> None:
        self._device, self._capturing_s = device, capturing_s
        self._steps, self._others = StepCost(), StepCost()
        self._moments: list[Moment] = []
        """When it began, and behind each forward since."""
        self._forwards: list[tuple[StepCost | None, int, int]] = []
        """What each teaches (nothing, where a step was captured), its rows, and the tokens that they see."""
        self._captured_s = 0.0

    def begin(self) -> None:
        """Forwards follow."""
        self._moments, self._forwards, self._captured_s = [moment(self._device)], [], self._capturing_s()

    def asked_for(self, num_rows: int, context: int, *, is_step: bool) -> None:
        """The device was asked for a forward of so many tokens, that see so many, and for what is drawn behind them."""
        captured_s, before_s = self._capturing_s(), self._captured_s
        self._captured_s = captured_s
        cost = None if captured_s > before_s else self._steps if is_step else self._others
        self._forwards.append((cost, num_rows, context))
        self._moments.append(moment(self._device))

    def learn(self) -> None:
        """Record how long the forwards took; the caller has waited for them. Further forwards may follow."""
        for (cost, num_rows, context), seconds in zip(self._forwards, seconds_between(self._moments), strict=True):
            if cost is not None:
                cost.observe(num_rows, context, seconds)
        self._moments, self._forwards = self._moments[-1:], []

    def of_step(self, num_rows: int, context: int) -> float:
        """Seconds of a step of so many tokens, that see so many; 0: not known."""
        return float(self._steps.seconds(np.array([num_rows]), context)[0])

    def of_other(self, num_rows: int, context: int) -> float:
        """As `of_step`, of another forward."""
        return float(self._others.seconds(np.array([num_rows]), context)[0])
