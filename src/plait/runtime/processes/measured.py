"""What the models that a recipe begins with measure on its held-out items, by whatever leads their ranks."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from plait.observe.progress import Progress
from plait.recipes.recipe import Recipe
from plait.runtime.evaluating.evaluation import Evaluation
from plait.runtime.evaluating.measure import measure
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.session import Leading
from plait.runtime.steps.aside import Aside
from plait.runtime.steps.calls import Calls
from plait.runtime.steps.filling import build_roles
from plait.runtime.steps.reward_pools import open_pools
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
        if not answers or model.role == "actor" or model.reward
    )
    return replace(prepared, models=models)


def measured(prepared: Prepared, leading: Leading, progress: Progress) -> Evaluation:
    """Answers to held-out prompts, or losses of held-out examples or pairs.

    Args:
        prepared: as of `of_asked`.
    """
    with progress, ExitStack() as stack:
        pools = open_pools(prepared, stack)
        judges = pools.pop("judges", None)
        recorder = Recorder()
        workers = leading.workers(recorder)
        stack.callback(workers.end_engines)
        roles = build_roles(prepared, workers, pools, recorder, progress.message)
        all_pools = (*pools.values(), *filter(None, (judges,)))
        for pool in all_pools:
            pool.looked = workers.tick
        progress.start()
        clock = workers.clock(all_pools, progress)
        calls = Calls(prepared.flow, roles, prepared.recipe, recorder, progress)
        result = measure(prepared, roles, judges, calls, Aside(clock, recorder, progress))
        workers.close()
        return result
