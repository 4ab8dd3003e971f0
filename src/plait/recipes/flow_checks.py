"""The flow of a recipe, traced and held against what else the recipe says. Reads no model and no data; torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from plait.dataflow import MISMATCHED, CallKind, Dataflow
from plait.errors import ConfigError
from plait.recipes.algorithm import traced_flow
from plait.recipes.checks import check_calls, check_sampling, check_trained_steps, check_unused
from plait.recipes.device_checks import check_served
from plait.recipes.engine_checks import check_engine, check_engine_calls
from plait.recipes.evaluation_sets import evaluation_sets
from plait.recipes.recipe import Recipe
from plait.recipes.reward_checks import check_evaluation, check_rewards
from plait.recipes.role_models import ToCome
from plait.recipes.staleness_checks import check_staleness
from plait.recipes.token_checks import check_teacher
from plait.recipes.turn_checks import check_turns


def checked_flow(
    recipe: Recipe,
    *,
    to_come: Mapping[str, ToCome] = MappingProxyType({}),
    trains: bool = True,
) -> Dataflow:
    """`traced_flow`, held against what else the recipe says.

    Args:
        to_come, trains: as of `prepare`.

    Raises:
        UserError: a key or the flow cannot be used; the message names the key and the remedy.
    """
    dataflow = traced_flow(recipe)
    check_calls(dataflow)
    if dataflow.of_kind(CallKind.GENERATE):
        check_sampling(dataflow, recipe)
    check_staleness(dataflow, recipe)
    check_served(recipe)
    check_engine(recipe)
    check_engine_calls(dataflow, recipe)
    check_turns(dataflow, recipe)
    check_unused(dataflow, recipe)
    check_rewards(dataflow, recipe, has_task=recipe.data.task is not None)
    check_evaluation(dataflow, recipe)
    _check_mismatched(dataflow, recipe)
    if trains:
        check_teacher(dataflow, recipe, to_come)
    if recipe.epochs is None:
        check_trained_steps(dataflow, recipe)
    return dataflow


def said_of_unread_options(flow: Dataflow, recipe: Recipe) -> Iterator[str]:
    """A sentence for each given option that the user's flow does not read (its class of options may have more than the
    flow uses)."""
    for name in recipe.options:
        if name in flow.unread:
            yield f"`options.{name}` does nothing: the flow `{flow.name}` does not read it with these options"


def said_of_ungraded(flow: Dataflow, recipe: Recipe) -> Iterator[str]:
    """That evaluations say nothing of how good answers are, in words, where a flow that samples knows it from what it
    reads in texts alone."""
    grades = [node.call for node in flow.of_kind(CallKind.GRADE) if node.rows == flow.main_rows.id]
    says_nothing = "score" not in flow.call_kinds("reward") and not recipe.evaluation.functions
    if grades and says_nothing and evaluation_sets(recipe) and flow.main_rows.kind is CallKind.GENERATE:
        yield (
            f"evaluations tell how long answers are, and not how good: `{grades[0]}` is read in training steps alone; "
            "name functions that score held-out answers in `evaluation.functions`, or set `evaluation.items` to 0"
        )


def _check_mismatched(flow: Dataflow, recipe: Recipe) -> None:
    """Raises ConfigError where a batch has no other completion for a prompt."""
    if all(node.call != MISMATCHED for node in flow.nodes):
        return
    asked = [("prompts_per_step", recipe.prompts_per_step)]
    asked += [(f"{one.section}.items", one.items) for one in evaluation_sets(recipe) if one.items is not None]
    for key, count in asked:
        if count == 1:
            raise ConfigError(
                f"`{key}` is 1, but the flow `{flow.name}` estimates the KL to the reference from completions of "
                "other rows of the batch; give 2 or more"
            )
