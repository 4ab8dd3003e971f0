"""The benchmark of roles that train together runs."""

from __future__ import annotations

import pytest

from tests.benchmarks.scripts import output_of


@pytest.mark.slow
def test_it_runs() -> None:
    sizes = ["--repeats", "1", "--steps", "1", "--micro-batches", "2", "4", "--tokens", "16"]
    printed = output_of("fused_training.py", "--tiny", *sizes)
    assert [printed.count(kind) for kind in ("greedy", "fused", "one each")] == [2, 2, 2]
