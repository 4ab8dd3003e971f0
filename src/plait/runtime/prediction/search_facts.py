"""What a search has to know of the roles of a recipe: how each may be cut, and which of them may train together."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import combinations

from plait.cost.layer_kinds import layer_kinds
from plait.dataflow import Dataflow
from plait.errors import ConfigError
from plait.layout.params import Parameters
from plait.layout.shards import layer_sizes, most_tp
from plait.models.shape import ModelShape
from plait.planner.plan_problem import MOST_STAGES, RoleFacts
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel, optimizer_of
from plait.schedule.joint_training import check_calls


def role_facts(recipe: Recipe, model: RoleModel, shape: ModelShape, parameters: Parameters) -> RoleFacts:
    """How a role may be cut.

    Args:
        shape, parameters: of its model.
    """
    adapted = recipe.lora.rank > 0
    uncut = adapted or bool(shape.recurrent)
    sharded = model.trained and optimizer_of(model.role, recipe).shard_gradients
    return RoleFacts(
        (1.0,) * shape.layers,
        last=shape.head_in_layers(1 if model.scalar else shape.vocabulary),
        layer_sizes=() if len(layer_kinds(shape)) == 1 else layer_sizes(parameters),
        max_tp=1 if uncut else most_tp(parameters),
        max_pp=1 if uncut or sharded else MOST_STAGES,
        whole_layers=recipe.sampling.exact,
        may_drop=not adapted,
    )


def joint_pairs(recipe: Recipe, flow: Dataflow, models: Sequence[RoleModel]) -> tuple[tuple[str, str], ...]:
    """Roles that may train together, two and two."""
    pairs = []
    for pair in combinations([model.role for model in models if model.trained], 2):
        has_stages = not any(optimizer_of(role, recipe).shard_gradients for role in pair)
        with contextlib.suppress(ConfigError):
            check_calls(flow, pair)
            pairs += [pair] if has_stages else []
    return () if recipe.lora.rank > 0 else tuple(pairs)
