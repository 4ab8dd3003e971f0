"""Seconds of a draft model's forwards by a clock of the test: a device's own, behind that of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.generation.draft_seconds import DraftSeconds
from tests.launches import GPU


class Device:
    """A device that computes what it is asked for one after another, and knows when each event was reached."""

    def __init__(self) -> None:
        self.done_s, self.waits = 0.0, 0

    def computes(self, seconds: float) -> None:
        self.done_s += seconds

    def event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at_s, self.is_waited_for = device, 0.0, False

    def record(self) -> None:
        self.at_s = self.device.done_s

    def synchronize(self) -> None:
        self.device.waits += 1

    def elapsed_time(self, then: Event) -> float:
        """Milliseconds, as CUDA says them; an error before the later one is reached."""
        assert self.device.waits > 0
        return 1e3 * (then.at_s - self.at_s)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    return device


def test_seconds_are_those_of_the_work_and_wait_for_its_end_alone(device: Device) -> None:
    """The host asks for all of it in no time. A step has a cost of its own: where it is replayed, a chunk of as many
    tokens takes longer."""
    seconds = DraftSeconds(GPU, lambda: 0.0)
    seconds.begin()
    for took_s, num_rows, is_step in ((0.5, 8, False), (0.01, 8, True), (0.01, 8, True)):
        device.computes(took_s)
        seconds.asked_for(num_rows, 108, is_step=is_step)
    assert device.waits == 0
    assert seconds.of_step(8, 108) == 0.0, "nothing is known yet"
    seconds.learn()
    assert device.waits == 1
    assert seconds.of_step(8, 108) == pytest.approx(0.01)
    assert seconds.of_other(8, 108) == pytest.approx(0.5)


def test_on_a_cpu_they_are_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 3.0, 3.5])
    monkeypatch.setattr("plait.data.host_device.time.perf_counter", lambda: next(now))
    seconds = DraftSeconds(torch.device("cpu"), lambda: 0.0)
    seconds.begin()
    seconds.asked_for(8, 8, is_step=False)
    seconds.asked_for(1, 9, is_step=True)
    seconds.learn()
    assert seconds.of_other(8, 8) == pytest.approx(2.0)
    assert seconds.of_step(1, 9) == pytest.approx(0.5)


def test_a_forward_in_which_a_step_is_captured_says_nothing(device: Device) -> None:
    captured_s = 0.0
    seconds = DraftSeconds(GPU, lambda: captured_s)
    seconds.begin()
    for took_s, captures_s in ((0.01, 0.0), (9.0, 0.5), (0.01, 0.0)):
        captured_s += captures_s
        device.computes(took_s)
        seconds.asked_for(1, 1, is_step=True)
        seconds.learn()
    assert seconds.of_step(1, 1) == pytest.approx(0.01)
