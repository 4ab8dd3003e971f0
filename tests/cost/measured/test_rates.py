"""The rates of this machine."""

from __future__ import annotations

from itertools import accumulate, cycle
from types import SimpleNamespace

import pytest

from plait.cost.measured import rates
from plait.cost.measured.rates import COPIED_BYTES, MATRIX_SIZE, measure_rates


def test_rates_are_measured() -> None:
    found = measure_rates("float32")
    assert found.bytes_per_s > 1e8
    assert found.flops_per_s > 1e8


def test_what_warms_up_does_not_count_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each kind of work a first time of 1 s, and two of 0.25 s."""
    clock = accumulate(cycle([0.0, 1.0, 0.0, 0.25, 0.0, 0.25]))
    monkeypatch.setattr(rates, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    found = measure_rates("float32")
    assert found.bytes_per_s == 2 * COPIED_BYTES["cpu"] / 0.25
    assert found.flops_per_s == 2 * MATRIX_SIZE["cpu"] ** 3 / 0.25
