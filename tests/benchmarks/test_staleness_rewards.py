"""The benchmark of rewards with batches generated ahead runs."""

from __future__ import annotations

import pytest

from tests.benchmarks.scripts import output_of


@pytest.mark.slow
def test_it_runs() -> None:
    printed = output_of("staleness_rewards.py", "--tiny", "--repeats", "1")
    kinds = [line.split("  ")[0].strip() for line in printed.splitlines()[1:]]
    assert kinds[0] == "n = 0"
    assert len(kinds) == 9
    assert "n = 2 recompute, tis" in kinds
