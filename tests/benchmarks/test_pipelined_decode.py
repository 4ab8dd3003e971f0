"""The benchmark of stages that decode as a ring runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.benchmarks.scripts import BENCHMARKS


@pytest.mark.slow
def test_it_runs() -> None:
    command = [sys.executable, BENCHMARKS / "pipelined_decode.py", "--tiny", "--repeats", "1", "--batches", "4", "6"]
    ended = subprocess.run(
        [*command, "--tokens", "6", "--stages", "2", "--rounds", "5", "--sleep", "5"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    for kind in ("one group", "ring 3", "two batches", "one worker"):
        assert ended.stdout.count(kind) == 2, ended.stdout
    assert ended.stdout.count("G = ") == 4
