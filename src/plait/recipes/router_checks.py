"""Which models have routers whose experts can be balanced: refused before any work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.errors import ConfigError
from plait.models.shape import ModelShape
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel, optimizer_of


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
