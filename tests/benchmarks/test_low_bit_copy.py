"""The benchmark of a copy in 4 bits runs."""

from __future__ import annotations

import pytest

from tests.benchmarks.scripts import output_of


@pytest.mark.slow
def test_it_runs() -> None:
    printed = output_of("low_bit_copy.py", "--tiny", "--repeats", "1")
    rows = [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("| ")]
    assert rows == ["group", "---", "16"]
