"""The count of what instances draft from runs, and finds the same samples both ways."""

from __future__ import annotations

import pytest

from tests.benchmarks.scripts import output_of


@pytest.mark.slow
def test_it_runs() -> None:
    printed = output_of("drafts_elsewhere.py", "--tiny", "--repeats", "1")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("| 2")]
    assert [row[1:3] for row in rows] == [[way, epoch] for way in ("their own", "of all") for epoch in "01"]
    assert [int(row[6]) > 0 for row in rows] == [False, False, True, True], "bytes are sent where texts are told"
