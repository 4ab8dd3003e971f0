"""Recipes of any options, run in any way: the same as by one plain process. The test's id is the seed of both, and they
are printed where it fails. float64, as in `test_placements`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.cases import slow_but
from tests.models.tiny import save_tiny
from tests.runs.placed_runs import where
from tests.runs.plans import assert_equal_runs
from tests.runs.random_recipes import ALGORITHMS, HOW, REPLIES, ROLLOUTS, WHAT, random_recipe

SEEDS = range(24)
QUICK = (4,)


@pytest.mark.parametrize("seed", slow_but(QUICK, SEEDS))
def test_no_way_to_run_a_recipe_changes_what_it_comes_to(seed: int, place: Path, placed: Callable[..., Recipe]) -> None:
    (place / "replies.py").write_text(REPLIES)
    if not (place / "draft").exists():
        save_tiny(place / "draft")
    drawn = random_recipe(seed)
    (algorithm, keys), plainly = drawn.flow, {"sampling.speculation": "off"}
    print(drawn)
    plain = placed(algorithm, f"plain-{seed}", **keys, **(plainly if algorithm in ROLLOUTS else {}))
    other = placed(algorithm, f"other-{seed}", **keys, **drawn.ways, **where(place, f"plan-{seed}", drawn.plan))
    run(plain)
    run(other)
    # Adam makes of the rounding of a gradient that is almost nothing, which goes by who adds what, 1e-7 of an update.
    assert_equal_runs(other.run_dir, plain.run_dir, tolerance=1e-7)


def test_every_key_is_drawn_in_the_end() -> None:
    drawn = [random_recipe(seed) for seed in range(400)]
    assert drawn[:20] == [random_recipe(seed) for seed in range(20)], "a seed says all"
    assert {one.flow[0] for one in drawn} == set(ALGORITHMS)
    keys = {key for one in drawn for key in (*one.flow[1], *one.ways)}
    keys |= {f"options.{key}" for one in drawn for key in one.flow[1]["options"]}
    assert {key for draw in (*WHAT, *HOW) for values in draw.among for key in values} <= keys
    assert {type(one.plan) for one in drawn} == {str, dict}
