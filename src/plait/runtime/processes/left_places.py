"""A run on fewer places than its recipe is for, as some of its nodes or GPUs were lost: the ranks that are left, and
their plan."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from plait.errors import UserError
from plait.launch.nodes.gathered import Gathered
from plait.recipes.plan_files import ranks_of
from plait.recipes.recipe import Recipe
from plait.runtime.inputs.prepared import Prepared
from plait.schedule.named_plans import AUTO

PreparedFor = Callable[[Recipe], Prepared]
"""Resolves a recipe of a run for the places that it has now; raises UserError."""


def begun_on(recipe: Recipe, prepared_for: PreparedFor, nodes: Gathered | None) -> Prepared:
    """A run that begins on the nodes of a stage before it, of which some may have been lost then.

    Raises:
        UserError: it cannot be run, or no plan fits what is left.
    """
    if nodes is None or len(nodes.nodes) == nodes.num_joined:
        return prepared_for(recipe)
    stated = ranks_of(recipe.plan) or recipe.devices
    if stated == 0:
        return prepared_for(recipe)  # as many as the nodes that are left have
    return fitted(recipe, stated // nodes.num_joined * len(nodes.nodes), prepared_for)


def fitted(recipe: Recipe, num_ranks: int, prepared_for: PreparedFor) -> Prepared:
    """The run on so many ranks, by the plan that its recipe names if that fits them, else by one that is found.

    Raises:
        UserError: none fits.
    """

    def by(plan: str) -> Prepared:
        return prepared_for(recipe.reopened().model_copy(update={"devices": num_ranks, "plan": plan}))

    if recipe.plan != AUTO and not ranks_of(recipe.plan):
        with suppress(UserError):
            return by(recipe.plan)
    return by(AUTO)
