"""The benchmark of prompts on a worker of their own runs."""

from __future__ import annotations

import pytest

from tests.benchmarks.scripts import output_of


@pytest.mark.slow
def test_it_runs() -> None:
    printed = output_of("prompts_apart.py", "--tiny", "--repeats", "1")
    assert "100.0% equal" in printed, printed
    for way in ("together", "apart"):
        assert printed.count(f" {way} ") >= 1, printed
