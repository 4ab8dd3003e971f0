"""The plan of a run that was found before: in an earlier stay, or when the run was checked."""

from __future__ import annotations

import sys

from plait.cost.placement import num_devices, planned_models
from plait.errors import DataError
from plait.observe.screen import say
from plait.recipes.recipe import Recipe
from plait.runtime.folder.run_files import RunFiles
from plait.runtime.inputs.prepared import Kept, Outline
from plait.runtime.prediction.spending import is_searched
from plait.schedule.completion import EVALUATE
from plait.schedule.named_plans import AUTO, model_calls
from plait.schedule.plan import Plan


def kept_for(recipe: Recipe, nodes: int, begun: RunFiles | None, planned: Plan | None = None) -> Kept:
    """What holds for a run on so many machines of what was found before.

    Args:
        begun: files of the run, where an earlier stay has begun it.
        planned: its plan as it was prepared when it was checked, before it began; then the stored one may be damaged.

    Raises:
        DataError: the recipe leaves its plan to be found, and the one that was found cannot be read.
    """
    stored = None if begun is None else _stored(begun, recipe, is_needed=planned is None)
    fitting = (plan for plan in (stored, planned) if plan is not None and _fits(plan, recipe, nodes))
    return Kept(next(fitting, None), planned if stored is None else stored)


def of_flow(plan: Plan | None, run: Outline) -> Plan | None:
    """A plan that was found before, where it places the calls of the run's flow, and no others; else None, which is
    said, and a new plan is searched for: the file of the flow has changed since."""
    if plan is None:
        return None
    placed = {p.call for p in plan.placements} - {EVALUATE}
    calls = {node.call for node in model_calls(run.flow, planned_models(run.recipe, run.models, run.shapes))}
    if placed == calls:
        return plan
    others = ", ".join(sorted(placed ^ calls))
    say(
        f"the flow has other calls than the plan that was found before ({others}): a new one is searched for",
        file=sys.stderr,
    )
    return None


def _fits(plan: Plan, recipe: Recipe, nodes: int) -> bool:
    """Whether a plan is one that would be searched for the recipe."""
    places = plan.num_ranks, plan.nodes
    return is_searched(recipe) and plan.name == AUTO and places == (num_devices(recipe), nodes)


def _stored(files: RunFiles, recipe: Recipe, *, is_needed: bool) -> Plan | None:
    """None where there is none, or it cannot be read and what it says is found again."""
    try:
        return Plan.load(files.plan)
    except DataError as error:
        if is_needed and is_searched(recipe) and files.plan.is_file():
            raise DataError(f"{error}; put a copy back, or remove the file and a new plan is searched for") from error
        return None
