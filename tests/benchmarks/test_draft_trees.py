"""The count of trees beside chains runs."""

from __future__ import annotations

import pytest

from tests.benchmarks.scripts import output_of


@pytest.mark.slow
def test_it_runs() -> None:
    """Drafts that are never accepted are worth no row: samples of random weights at temperature 1."""
    printed = output_of("draft_trees.py", "--tiny")
    rows = [[cell.strip() for cell in line.split("|")] for line in printed.splitlines() if line.startswith("| ")]
    assert [row[2] for row in rows[2:]] == ["1", "4", "1", "4"]
    for row in rows[2:]:
        assert float(row[4]) >= float(row[3]) >= 1.0, "a chain is a tree"
