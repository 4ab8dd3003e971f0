"""The order of ranks that a dry run proposes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from plait.cli.dry_run import dry_run
from plait.cost.model_parameters import parameters_of
from plait.cost.placement import resolve_plan
from plait.cost.rank_order import better_orders
from plait.layout.mesh import Parallelism
from plait.layout.shards import shard
from plait.recipes.recipe import Recipe
from tests.cost.test_placement import facts_of
from tests.runs.plan_files import write_plan

MakeRecipe = Callable[..., Recipe]
PLACES = {"actor.train": "0,1,2,3 tp4", "actor.generate": "0,1,2,3 dp2 tp2", "ref.logprobs": "0,1,2,3 dp4"}


@pytest.mark.process
def test_ranks_that_keep_their_quarters_generate_together(make_recipe: MakeRecipe, tmp_path: Path, capsys) -> None:
    """Ranks 1 and 2 generate with the half that they have nothing of, but norms and the keys that two ranks share."""
    recipe = make_recipe(plan=str(write_plan(tmp_path, "plain", PLACES)))
    flow, models, shapes = facts_of(recipe)
    (better,) = better_orders(recipe, models, resolve_plan(recipe, flow, models, shapes))
    parameters = parameters_of(models)["actor"]

    def elements(tp: int, rank: int) -> int:
        return sum(block.num_elements for block in shard(parameters, Parallelism(tp=tp), rank, 0).blocks)

    norms = sum(param.num_elements for param in parameters.params if param.cut is None)
    lacking = [elements(2, rank // 2) - elements(4, rank) for rank in range(4)]
    assert (better.placement.call, better.ranks, better.received_bytes) == (
        "actor.generate",
        (0, 2, 1, 3),
        4 * sum(lacking),
    )
    others = [elements(2, half) - norms for half in (1, 0)]
    assert better.stated_bytes == 4 * (lacking[0] + others[0] + others[1] + lacking[3])

    assert dry_run(recipe) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "hint: with `ranks` [0, 2, 1, 3] for actor.generate in the plan file, all devices together would" in printed

    followed = PLACES | {"actor.generate": "0,2,1,3 dp2 tp2"}
    recipe = make_recipe(plan=str(write_plan(tmp_path, "better", followed)))
    assert not better_orders(recipe, models, resolve_plan(recipe, flow, models, shapes))
    alone = make_recipe()
    assert not better_orders(alone, models, resolve_plan(alone, flow, models, shapes))
