"""Whether another order of a placement's ranks would keep more of the trained weights where they are: a hint of a dry
run. The runs themselves take ranks as the plan states them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plait.cost.model_parameters import parameters_of
from plait.layout.holdings import weights
from plait.layout.move import traffic_of
from plait.layout.regroup import regrouped
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel
from plait.schedule.placements import parts_of, placements_of
from plait.schedule.plan import Plan


@dataclass(frozen=True)
class BetterOrder:
    """For one placement.

    ranks:          in their better order
    received_bytes: what all ranks together receive after each training, in that order
    stated_bytes:   and in the order of the plan
    """

    call: str
    ranks: tuple[int, ...]
    received_bytes: int
    stated_bytes: int


def better_orders(recipe: Recipe, models: Sequence[RoleModel], plan: Plan) -> list[BetterOrder]:
    """For placements of trained roles that score or generate, in the order of the plan; those alone that gain by it."""
    trained = [model for model in models if model.trained]
    if plan.num_ranks == 1 or recipe.lora.rank > 0 or not trained:
        return []
    return [better for model in trained for better in _of_role(recipe, model, plan)]


def _of_role(recipe: Recipe, model: RoleModel, plan: Plan) -> Iterator[BetterOrder]:
    home, cluster = placements_of(plan, model.role).home, plan.cluster
    others = [
        p
        for p in plan.placements
        if p.role == model.role and p.mode != "train" and not parts_of(p.layout) <= parts_of(home)
    ]
    if not others:
        return
    parameters = parameters_of([model])[model.role]
    source = weights(parameters, home, recipe.dtype, "home")
    for p in others:
        layout = regrouped(p.layout, parameters, source, cluster)
        stated_bytes, regrouped_bytes = (
            traffic_of(source, weights(parameters, destination, recipe.dtype, "copy"), cluster).total_bytes
            for destination in (p.layout, layout)
        )
        if regrouped_bytes < stated_bytes:
            yield BetterOrder(p.call, layout.mesh.ranks, regrouped_bytes, stated_bytes)
