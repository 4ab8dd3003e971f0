"""The benchmark of truncated sampling runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.benchmarks.scripts import BENCHMARKS


@pytest.mark.slow
def test_it_runs() -> None:
    command = [sys.executable, BENCHMARKS / "sampling.py", "--tiny", "--repeats", "1", "--tokens", "8"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("top_k 50, top_p 0.9") == 2
