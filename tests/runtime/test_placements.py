"""Where the calls of a flow run changes nothing of what is computed: tokens, metrics, weights. float64."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.cases import slow_but
from tests.runtime.placed_runs import PLANS, where
from tests.runtime.plans import assert_equal_runs

QUICK = ("grpo-nothing-stays-2", "grpo-followed-2")


@pytest.fixture(scope="module")
def reference(placed: Callable[..., Recipe], place: Path) -> Callable[[str, dict[str, Any]], Path]:
    """The run of a flow on one process, run once."""

    def get(flow: str, keys: dict[str, Any]) -> Path:
        name = f"one-{flow}-{zlib.crc32(repr(sorted(keys.items())).encode()):08x}"
        if not (place / name).exists():
            run(placed(flow, name, **keys))
        return place / name

    return get


@pytest.mark.parametrize("name", slow_but(QUICK, PLANS))
def test_a_plan_changes_nothing(
    name: str,
    place: Path,
    placed: Callable[..., Recipe],
    reference: Callable[[str, dict[str, Any]], Path],
) -> None:
    (flow, keys), plan = PLANS[name]
    recipe = placed(flow, name, **keys, **where(place, name, plan))
    outcome = run(recipe)
    assert outcome.finished
    assert_equal_runs(recipe.run_dir, reference(flow, keys))
