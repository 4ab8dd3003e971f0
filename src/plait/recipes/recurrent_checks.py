"""What does not go with models whose layers keep a state (`ModelShape.recurrent`): refused before any work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.dataflow import Dataflow
from plait.errors import ConfigError
from plait.models.shape import ModelShape
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel
from plait.schedule.plan import Plan


def check_recurrent(
    flow: Dataflow, recipe: Recipe, models: Sequence[RoleModel], shapes: Mapping[str, ModelShape]
) -> None:
    """Raises ConfigError where such a model is to draw samples.

    Args:
        shapes: by the model's name.
    """
    for model in models:
        if "generate" in flow.call_kinds(model.role) and shapes[model.name].recurrent:
            raise ConfigError(
                f"key `{model.key}`: {_said(model, shapes)}, with which plait does not generate yet, but the flow "
                f"`{flow.name}` draws samples; take a flow that reads them (sft, dpo, kto, reward_model), or another "
                f"`{model.key}`"
            )


def check_uncut(plan: Plan, models: Sequence[RoleModel], shapes: Mapping[str, ModelShape], label: str) -> None:
    """Raises ConfigError, which begins with `label`, where a completed plan cuts such a model."""
    by_role = {model.role: model for model in models}
    for placement in plan.placements:
        model = by_role[placement.role]
        if (placement.tp > 1 or placement.pp > 1) and shapes[model.name].recurrent:
            raise ConfigError(
                f"{label}: {placement.call} has tp {placement.tp} and pp {placement.pp}, but {_said(model, shapes)}, "
                "and such models are not cut; set tp and pp to 1 (dp may be more)"
            )


def _said(model: RoleModel, shapes: Mapping[str, ModelShape]) -> str:
    shape = shapes[model.name]
    return f"{len(shape.recurrent)} of the {shape.layers} layers of `{model.name}` keep a state (linear attention)"
