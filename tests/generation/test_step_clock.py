"""How long a step keeps a rank busy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from plait.generation import step_clock
from plait.generation.step_clock import StepClock


def test_seconds_in_which_nothing_of_a_step_is_done_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 7 s one waits for other ranks, a quarter captures the step, two make weights ready; in a half a step before it
    lands."""
    now = [10.0]
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    joint: Any = SimpleNamespace(waited_s=1.0)
    forward: Any = SimpleNamespace(capturing_s=0.5)
    turns: Any = SimpleNamespace(landing_s=3.0)
    clock = StepClock(joint, turns, forward)
    now[0], joint.waited_s, forward.capturing_s, turns.landing_s = 15.0, 2.0, 0.75, 3.5
    with clock.packing():
        now[0] += 2.0
    assert (clock.seconds, clock.packing_s) == (3.25, 2.0)
