"""The rates of this machine."""

from __future__ import annotations

from plait.cost.measured.rates import measure_rates


def test_rates_are_measured() -> None:
    rates = measure_rates("float32")
    assert rates.bytes_per_s > 1e8
    assert rates.flops_per_s > 1e8
