"""The benchmark of generation beside training runs."""

from __future__ import annotations

import pytest

from tests.benchmarks.scripts import output_of


@pytest.mark.slow
def test_it_runs() -> None:
    printed = output_of("overlap.py", "--tiny", "--repeats", "1", "--steps", "1")
    assert [line.split("  ")[0].strip() for line in printed.splitlines()[1:]] == [
        "colocated",
        "split",
        "n = 1",
        "n = 2",
    ]
