"""What `plait simulate` predicts of the plan that it is given, where a test looks at no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from plait.runtime.prediction import choosing
from plait.runtime.prediction.choosing import Choice, predicted
from plait.runtime.prediction.planning import Planning
from plait.schedule.plan import Plan


def leave_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the rest of a test nothing stands beside the plan: what others would make is searched for, which takes ten
    seconds on tens of devices."""

    def alone(planning: Planning, plan: Plan, tell: Callable[[str], None]) -> Choice:
        return Choice(predicted(planning, plan), (), (), 1, 0.0)

    monkeypatch.setattr(choosing, "beside_others", alone)
