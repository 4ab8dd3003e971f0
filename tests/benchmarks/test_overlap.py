"""The benchmark of generation beside training runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.benchmarks.scripts import BENCHMARKS


@pytest.mark.slow
def test_it_runs() -> None:
    command = [sys.executable, BENCHMARKS / "overlap.py", "--tiny", "--repeats", "1", "--steps", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert [line.split("  ")[0].strip() for line in ended.stdout.splitlines()[1:]] == [
        "colocated",
        "split",
        "n = 1",
        "n = 2",
    ]
