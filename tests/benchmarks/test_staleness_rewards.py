"""The benchmark of rewards with batches drawn ahead runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.benchmarks.scripts import BENCHMARKS


@pytest.mark.slow
def test_it_runs() -> None:
    command = [sys.executable, BENCHMARKS / "staleness_rewards.py", "--tiny", "--repeats", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    kinds = [line.split("  ")[0].strip() for line in ended.stdout.splitlines()[1:]]
    assert kinds[0] == "n = 0"
    assert len(kinds) == 9
    assert "n = 2 recompute, tis" in kinds
