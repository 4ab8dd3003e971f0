"""Where the benchmarks lie, which tests run as scripts."""

from __future__ import annotations

from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
