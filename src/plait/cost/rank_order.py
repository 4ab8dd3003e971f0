"""Whether another order of a placement's ranks would keep more of the trained weights where they are: a hint of a dry
run, and what a search has its best plans take. The runs themselves take ranks as the plan states them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from plait.cost.model_parameters import parameters_of
from plait.cost.moves import stacked
from plait.layout.holdings import weights
from plait.layout.move import traffic_of
from plait.layout.params import Parameters
from plait.layout.regroup import regrouped
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel
from plait.schedule.placements import parts_of, placements_of
from plait.schedule.plan import Placement, Plan


@dataclass(frozen=True)
class BetterOrder:
    """For one placement.

    placement:      as the plan states it
    ranks:          in their better order
    received_bytes: what all ranks together receive after each training, in that order
    stated_bytes:   and in the order of the plan
    """

    placement: Placement
    ranks: tuple[int, ...]
    received_bytes: int
    stated_bytes: int


def better_orders(
    recipe: Recipe, models: Sequence[RoleModel], plan: Plan, parameters: Mapping[str, Parameters] | None = None
) -> list[BetterOrder]:
    """For placements of trained roles that score or generate, in the order of the plan; those alone that gain by it.

    Args:
        parameters: of each role's model; None: they are made.
    """
    trained = [model for model in models if model.trained]
    if plan.num_ranks == 1 or recipe.lora.rank > 0 or not trained:
        return []
    return [better for model in trained for better in _of_role(recipe, model, plan, parameters)]


def _of_role(
    recipe: Recipe, model: RoleModel, plan: Plan, parameters: Mapping[str, Parameters] | None
) -> Iterator[BetterOrder]:
    home, cluster = placements_of(plan, model.role).home, plan.cluster
    others = [
        p
        for p in plan.placements
        if p.role == model.role and p.mode != "train" and not parts_of(p.layout) <= parts_of(home)
    ]
    if not others:
        return
    whole = (parameters or parameters_of([model]))[model.role]
    for p in others:
        layers, origin, goal = stacked(whole, home, p.layout)
        source = weights(layers, origin, recipe.dtype, "home")
        layout = regrouped(goal, layers, source, cluster)
        stated_bytes, regrouped_bytes = (
            traffic_of(source, weights(layers, destination, recipe.dtype, "copy"), cluster).total_bytes
            for destination in (goal, layout)
        )
        if regrouped_bytes < stated_bytes:
            yield BetterOrder(p, layout.mesh.ranks, regrouped_bytes, stated_bytes)
