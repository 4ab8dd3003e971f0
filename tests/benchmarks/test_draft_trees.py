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


@pytest.mark.slow
def test_a_copy_of_the_policy_is_mostly_right() -> None:
    """It draws with the samples' noise. Its second draft is counted where it was wrong."""
    printed = output_of("draft_trees.py", "--tiny", "--copy-group", "16")
    assert "drafts of the policy's copy in 4 bits with groups of 16" in printed
    first, second, of_failures = (
        float(line.split()[-1 if "wrong" in line else 1].rstrip("%"))
        for line in printed.splitlines()
        if line.startswith(("first ", "second")) and "from" not in line
    )
    assert first > 80
    assert second <= 100 - first
    assert of_failures >= second
    rows = [[cell.strip() for cell in line.split("|")] for line in printed.splitlines() if line.startswith("| ")]
    assert all(float(row[4]) >= float(row[3]) > 1.0 for row in rows[2:]), "a chain is a tree, and drafts are accepted"
