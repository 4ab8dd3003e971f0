"""The benchmarks of stage fusion run: the measured one on tiny models, the simulated one on one pair."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.scripts import output_of


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    """Three ways of a step and their ceiling, with responses that are the same in all of them; and their picture."""
    drawn = tmp_path / "step.svg"
    ways = ["--tiny", "--distributions", "1", "--steps", "1", "--shares", "0.25", "--tokens", "40"]
    lines = output_of("stage_fusion.py", *ways, "--picture", str(drawn)).splitlines()
    assert {line.split()[0] for line in lines} == {"lengths", "off", "auto", "0.25", "ceiling"}
    assert all(f"fusion: {way}, " in drawn.read_text() for way in ("off", "auto", "0.25"))


@pytest.mark.slow
def test_a_pair_is_simulated() -> None:
    """A row for the pair, whose gains are those of a machine that loses nothing by them."""
    pair = ["--pairs", "33B/13B", "--lengths", "512", "--seconds", "1"]
    head, _, row, *_ = output_of("fusion_pairs.py", *pair).splitlines()
    assert head.startswith("| simulated: ")
    gains = [float(cell.split()[0]) for cell in row.split("|")[3:8]]
    assert all(1.0 <= gain < 1.6 for gain in gains)
