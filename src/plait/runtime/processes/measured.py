"""What the models that a recipe begins with measure on its held-out items, by whatever leads their ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial

from plait.observe.progress import ProgressSink
from plait.recipes.recipe import Recipe
from plait.runtime.evaluating.evaluations import Evaluations
from plait.runtime.evaluating.measure import measure
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.steps.calls import Calls
from plait.runtime.steps.opened_roles import open_roles
from plait.runtime.workers import Leading
from plait.schedule.named_plans import NAMES
from plait.stop_signals import raise_lost
from plait.workers.recorder import Recorder


def for_measuring(recipe: Recipe) -> Recipe:
    """On all its devices alike, which are this machine's."""
    return recipe.letting_be().model_copy(update={"plan": NAMES[0], "launcher": "local"})


def of_asked(prepared: Prepared) -> Prepared:
    """With the models that are asked, none of which is trained."""
    answers = any(one.prompts for one in prepared.held_out)
    models = tuple(
        replace(model, trained=False)
        for model in prepared.models
        if not answers or model.role == "actor" or model.reward
    )
    return replace(prepared, models=models)


def measured(prepared: Prepared, leading: Leading, progress: AbstractContextManager[ProgressSink]) -> Evaluations:
    """Answers to held-out prompts, or losses of held-out examples or pairs.

    Args:
        prepared: as of `of_asked`.
        progress: where the progress of the evaluation is shown, while inside.
    """
    with progress as shown, ExitStack() as stack:
        recorder = Recorder()
        opened = open_roles(prepared, partial(leading.workers, recorder), recorder, shown, stack)
        raise_lost()
        shown.start()
        calls = Calls(prepared, opened.roles, recorder, shown)
        result = measure(prepared, opened.roles, opened.eval_functions, calls, opened.between_steps)
        opened.workers.close()
        return result
