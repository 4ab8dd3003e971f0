"""The benchmarks of stage fusion run: the measured one on tiny models, the simulated one on one pair."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.scripts import BENCHMARKS


def printed(*command: str) -> list[str]:
    ended = subprocess.run(
        [sys.executable, BENCHMARKS / command[0], *command[1:]], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    """Three ways of a step and their ceiling, with responses that are the same in all of them; and their picture."""
    drawn = tmp_path / "step.svg"
    ways = ["--tiny", "--distributions", "1", "--steps", "1", "--shares", "0.25", "--tokens", "40"]
    lines = printed("stage_fusion.py", *ways, "--picture", str(drawn))
    assert {line.split()[0] for line in lines} == {"lengths", "off", "auto", "0.25", "ceiling"}
    assert all(f"fusion: {way}, " in drawn.read_text() for way in ("off", "auto", "0.25"))


@pytest.mark.slow
def test_a_pair_is_simulated() -> None:
    """A row for the pair, whose gains are those of a machine that loses nothing by them."""
    head, _, row, *_ = printed("fusion_pairs.py", "--pairs", "33B/13B", "--lengths", "512", "--seconds", "1")
    assert head.startswith("| simulated: ")
    gains = [float(cell.split()[0]) for cell in row.split("|")[3:8]]
    assert all(1.0 <= gain < 1.6 for gain in gains)
