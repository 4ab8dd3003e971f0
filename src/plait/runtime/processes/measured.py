"""What the models that a recipe begins with measure on its held-out items, by whatever leads their ranks."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from plait.observe.progress import Progress
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import REWARD_ROLES
from plait.runtime.evaluating.evaluation import Evaluation
from plait.runtime.evaluating.measure import measure
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.steps.calls import Calls
from plait.runtime.steps.opened_roles import open_roles
from plait.runtime.workers import Leading
from plait.schedule.named_plans import NAMES
from plait.workers.recorder import Recorder


def for_measuring(recipe: Recipe) -> Recipe:
    """On all its devices alike, which are this machine's."""
    return recipe.letting_be().model_copy(update={"plan": NAMES[0], "launcher": "local"})


def of_asked(prepared: Prepared) -> Prepared:
    """With the models that are asked, none of which is trained."""
    answers = bool(prepared.held_out)
    models = tuple(
        replace(model, trained=False)
        for model in prepared.models
        if not answers or model.role == "actor" or (model.role in REWARD_ROLES and not model.trained)
    )
    return replace(prepared, models=models)


def measured(prepared: Prepared, leading: Leading, progress: Progress) -> Evaluation:
    """Answers to held-out prompts, or losses of held-out examples or pairs.

    Args:
        prepared: as of `of_asked`.
    """
    with progress, ExitStack() as stack:
        recorder = Recorder()
        opened = open_roles(prepared, leading, recorder, progress, stack)
        progress.start()
        calls = Calls(prepared.flow, opened.roles, prepared.recipe, recorder, progress)
        result = measure(prepared, opened.roles, opened.judges, calls, opened.aside)
        opened.workers.close()
        return result
