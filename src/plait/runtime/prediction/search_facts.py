"""What a search has to know of the roles of a recipe: how each may be cut, and which of them may train together."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from itertools import combinations

from plait.cost.layer_kinds import layer_kinds
from plait.cost.model_parameters import needs_all_tokens
from plait.dataflow import Dataflow
from plait.errors import ConfigError
from plait.layout.params import Parameters
from plait.layout.shards import layer_sizes, most_tp
from plait.models.shape import ModelShape
from plait.planner.plan_problem import RoleFacts
from plait.recipes.engine_checks import abilities
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel, optimizer_of
from plait.schedule.joint_training import check_calls


def facts_of_roles(
    recipe: Recipe,
    models: Sequence[RoleModel],
    shapes: Mapping[str, ModelShape],
    parameters: Mapping[str, Parameters],
) -> dict[str, RoleFacts]:
    """Role → how it may be cut.

    Args:
        shapes: by the model's name; parameters: by the role.
    """
    facts = {}
    for model in models:
        shape, own = shapes[model.name], parameters[model.role]
        facts[model.role] = RoleFacts(
            (1.0,) * shape.layers,
            last=shape.head_in_layers(1 if model.scalar else shape.vocabulary),
            layer_sizes=() if len(layer_kinds(shape)) == 1 else layer_sizes(own),
            max_tp=most_tp(own),
            whole_layers=recipe.sampling.exact,
            trains_whole=recipe.sequence_parallel and model.trained and needs_all_tokens(model) != "",
            may_drop=recipe.lora.rank == 0,
            one_copy=model.trained and optimizer_of(model.role, recipe).shards_gradients,
            shards_weights=model.trained and optimizer_of(model.role, recipe).shard_weights,
            prompts_apart=recipe.update_rule.waits and not shape.recurrent and abilities(recipe).moves,
        )
    return facts


def joint_pairs(recipe: Recipe, flow: Dataflow, models: Sequence[RoleModel]) -> tuple[tuple[str, str], ...]:
    """Roles that may train together, two and two."""
    pairs = []
    apart = [model.role for model in models if model.trained and not optimizer_of(model.role, recipe).shard_weights]
    for pair in combinations(apart, 2):
        with contextlib.suppress(ConfigError):
            check_calls(flow, pair)
            pairs.append(pair)
    return tuple(pairs)
