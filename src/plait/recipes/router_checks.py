"""Which models have routers whose experts can be balanced, or chosen again as they were: refused before any work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.dataflow import CallKind, Dataflow
from plait.errors import ConfigError
from plait.models.shape import ModelShape
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel, optimizer_of


def replays_experts(role: str, flow: Dataflow, recipe: Recipe) -> bool:
    """Whether the tokens of samples go to the experts, in what a role scores and trains on, that they went to when they
    were drawn: of the role that draws them. Others have routers of their own."""
    return recipe.sampling.router_replay and any(node.role == role for node in flow.of_kind(CallKind.GENERATE))


def check_replayed(
    recipe: Recipe, flow: Dataflow, models: Sequence[RoleModel], shapes: Mapping[str, ModelShape]
) -> None:
    """Raises ConfigError where experts are to be chosen again, and nothing is drawn, several roles draw, or the model
    that draws has none.

    Args:
        shapes: by the model's name.
    """
    if not recipe.sampling.router_replay:
        return
    drawing = sorted({str(node.role) for node in flow.of_kind(CallKind.GENERATE)})
    if len(drawing) != 1:
        who = "no role draws samples" if not drawing else f"the roles {', '.join(drawing)} draw samples"
        raise ConfigError(
            f"`sampling.router_replay` is true, but {who} in this flow (`algorithm`), and experts are those of the one "
            "role that does; set it to false"
        )
    for model in models:
        if model.role in drawing and not shapes[model.name].experts:
            raise ConfigError(
                f"`sampling.router_replay` is true, but `{model.name}`, which the role `{model.role}` begins as, is no "
                f"mixture of experts; set it to false, or `{model.key}` to another"
            )


def check_balanced(recipe: Recipe, models: Sequence[RoleModel], shapes: Mapping[str, ModelShape]) -> None:
    """Raises ConfigError where the routers of a trained model are to be balanced, and it has none, or Transformers has
    no such loss for its family.

    Args:
        shapes: by the model's name.
    """
    for model in models:
        optimizer, shape = optimizer_of(model.role, recipe), shapes[model.name]
        if model.trained and optimizer.router_aux_loss_coef > 0 and not shape.balances:
            key = "optimizer" if optimizer is recipe.optimizer else f"{model.role}.optimizer"
            has = "is no mixture of experts"
            if shape.experts:
                has = "is of a family for which Transformers has no loss that balances experts (`router_aux_loss_coef`)"
            raise ConfigError(
                f"`{key}.router_aux_loss_coef` is {optimizer.router_aux_loss_coef:g}, but `{model.name}`, which the "
                f"role `{model.role}` begins as, {has}; set it to 0, or `{model.key}` to another"
            )
