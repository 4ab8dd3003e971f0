"""What a person should know of a run before it begins, though nothing of it is wrong."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from plait.dataflow import Dataflow
from plait.models.files.adapter_folder import adapter_of
from plait.observe.loading import loading
from plait.observe.screen import say
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel, optimizer_of


def say_notices(flow: Dataflow, recipe: Recipe, models: Sequence[RoleModel]) -> None:
    """Say where adapters are merged, and where a run ends before the learning rate of a role is at its peak.

    Args:
        models: of a run that trains.
    """
    for name in dict.fromkeys(model.name for model in models if recipe.lora.rank == 0):
        if adapter_of(name) is not None:
            loading(f"the adapter {name}, which is merged into the weights, as without `lora` all are trained")
    for role in (model.role for model in models if model.trained):
        settings, steps = optimizer_of(role, recipe), flow.optimizer_steps(role, recipe.steps)
        if settings.warmup_steps > steps:
            key = f"{role}.optimizer" if role in ("critic", "cost_critic") else "optimizer"
            taken = f"`{key}.warmup_steps` is {settings.warmup_steps:,}, and the run has {steps:,} optimizer steps"
            say(f"{taken}: it ends before `{key}.learning_rate` is reached", file=sys.stderr)
