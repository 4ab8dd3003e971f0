"""The benchmark of stages that decode as a ring runs."""

from __future__ import annotations

import pytest

from tests.benchmarks.scripts import output_of


@pytest.mark.slow
def test_it_runs() -> None:
    sizes = ["--repeats", "1", "--batches", "4", "6", "--tokens", "6", "--stages", "2", "--rounds", "5", "--sleep", "5"]
    printed = output_of("pipelined_decode.py", "--tiny", *sizes)
    for kind in ("one group", "ring 3", "two batches", "one worker"):
        assert printed.count(kind) == 2, printed
    assert printed.count("G = ") == 4
