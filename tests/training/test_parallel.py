"""Several ranks against one: the same metrics, scores and weights, whatever dp, tp and pp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.launch.interface import Group
from plait.layout.mesh import Parallelism
from tests.training.worker import reference

RANKS = range(4)
OWN = ("tokens_computed",)
"""Metrics that say how much was computed, not what: cutting a group pays its prompt again."""


@pytest.fixture(scope="session")
def alone(tmp_path_factory) -> Any:
    """The reference of a case, made once: its metrics and its file."""
    made: dict[Any, tuple[list[dict[str, float]], Path]] = {}
    folder = tmp_path_factory.mktemp("alone")

    def of(case: str, model: str, dtype: str, **options: Any) -> tuple[list[dict[str, float]], Path]:
        key = (case, model, dtype, *sorted(options.items()))
        if key not in made:
            path = folder / f"{len(made)}.pt"
            made[key] = reference(case, model, dtype, path, **options), path
        return made[key]

    return of


def check(four: Group, alone: Any, sizes: Parallelism, case: str, model: str, dtype: str, near: float, **options: Any):
    expected, path = alone(case, model, dtype)
    handle = four.submit(RANKS, "compare", sizes, case, model, dtype, str(path), options)
    found = [answer for answer in handle.result(120.0) if answer is not None]
    assert len(found) == sizes.size
    for metrics, scores_off, weights_off in found:
        assert metrics == found[0][0], "every rank says the same, bit for bit"
        assert scores_off <= near
        assert weights_off <= near
    for mine, theirs in zip(found[0][0], expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            if not name.endswith(OWN):
                assert mine[name] == pytest.approx(value, rel=near, abs=near), name


@pytest.mark.parametrize("case", ["grpo", "pairs", "critic", "scores"])
@pytest.mark.parametrize("dp", [2, 4])
def test_data_parallel(four, alone, dp, case):
    check(four, alone, Parallelism(dp=dp), case, "tied", "float64", 1e-9)
