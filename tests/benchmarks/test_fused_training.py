"""The benchmark of roles that train together runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.benchmarks.scripts import BENCHMARKS


@pytest.mark.slow
def test_it_runs() -> None:
    command = [sys.executable, BENCHMARKS / "fused_training.py", "--tiny", "--repeats", "1", "--steps", "1"]
    ended = subprocess.run(
        [*command, "--micro-batches", "2", "4", "--tokens", "16"], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    assert [ended.stdout.count(kind) for kind in ("greedy", "fused", "one each")] == [2, 2, 2]
