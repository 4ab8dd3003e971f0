"""What a run does with the memory of its GPUs, as far as its recipe and its plan leave that open."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

from plait.cost.lengths import SampleLengths
from plait.cost.model_parameters import parameters_of
from plait.cost.offload_policy import OffloadPolicy
from plait.cost.placed import Facts
from plait.cost.placement import device_bytes, num_devices
from plait.cost.spent_memory import (
    is_open,
    leaving_text,
    sparing,
    spent_text,
    with_idle_away,
    with_memory_spent,
    with_pools_kept,
)
from plait.errors import cause_of
from plait.models.shape import ModelShape
from plait.observe.loading import loading
from plait.observe.screen import say
from plait.recipes.engine_checks import said_of_idle_keys
from plait.recipes.evaluation_sets import evaluation_sets
from plait.recipes.flow_checks import said_of_ungraded, said_of_unread_options
from plait.recipes.generated_ahead import scores_ahead
from plait.recipes.recipe import Recipe
from plait.runtime.inputs.prepared import Outline, Prepared
from plait.schedule.named_plans import AUTO, NAMES
from plait.schedule.plan import Plan
from plait.schedule.stage_fusion import nothing_to_hide


def spending(run: Outline, plan: Plan, lengths: SampleLengths, *, is_alike: bool = True) -> Outline:
    """The run with a recipe that states how long micro-batches are, and whether activations are kept, on GPUs; says
    what was found. On CPUs as it is. What is wrong with a forecast keeps no run from its work.

    Args:
        plan: completed.
        is_alike: all GPUs of the run are as those of this machine.
    """
    recipe = run.recipe
    if not is_open(recipe):
        return run
    try:
        facts = Facts(recipe, run.models, run.shapes, parameters_of(run.models), plan, run.flow, lengths)
        room_bytes = device_bytes(recipe, plan.cluster.devices)
        found = with_memory_spent(facts, room_bytes, may_leave=_is_by_name(recipe), is_alike=is_alike)
    except Exception as error:
        say(f"what fits on a GPU is not known: {type(error).__name__}: {cause_of(error)}", file=sys.stderr)
        found = sparing(recipe)
    loading(spent_text(found))
    return replace(run, recipe=found)


def is_searched(recipe: Recipe) -> bool:
    """Whether the plan of a run is found before it."""
    return recipe.plan == AUTO and num_devices(recipe) > 1


def _is_by_name(recipe: Recipe) -> bool:
    """Whether the plan of a run follows from a name: no file says it, and it is not found."""
    return recipe.plan in (*NAMES, AUTO) and not is_searched(recipe)


def settled(run: Outline, plan: Plan, lengths: SampleLengths) -> Plan:
    """The completed plan of a run as it is followed: on GPUs a plan by name in which what does not fit idles in host
    memory, and pools stay where they fit. (A file says itself what leaves and what stays; a plan that was found does,
    too.) Says what it changes, and what of the recipe has nothing to do in it."""
    recipe = run.recipe
    for text in (
        *said_of_unread_options(run.flow, recipe),
        *said_of_ungraded(run.flow, recipe),
        *said_of_idle_keys(recipe, plan),
        *_said_of_fusion(run, plan),
    ):
        say(text, file=sys.stderr)
    if recipe.device != "cuda" or not _is_by_name(recipe):
        return plan
    parameters = parameters_of(run.models)
    facts = Facts(recipe, run.models, run.shapes, parameters, plan, run.flow, lengths)
    room_bytes = device_bytes(recipe, plan.cluster.devices)
    plan = with_pools_kept(replace(facts, plan=with_idle_away(facts, room_bytes)), room_bytes)
    if leaving := leaving_text(plan):
        text = f"plan {plan.name}: all of it does not fit on a GPU, so what idles is in host memory: {leaving}"
        say(text, file=sys.stderr)
    return plan


def why_no_fusion(run: Outline | Prepared, plan: Plan) -> str:
    """Why `fusion` has nothing to hide in a plan, in words; empty where it has something."""
    copied = OffloadPolicy(run.models, plan, adapted=run.recipe.lora.rank > 0).scores_with_copies
    roles = [model.role for model in run.models]
    return nothing_to_hide(plan, run.flow, roles, copied, scores_ahead(run.flow, run.recipe))


def _said_of_fusion(run: Outline, plan: Plan) -> Iterator[str]:
    """`why_no_fusion`, where the recipe states `fusion`."""
    if run.recipe.fusion_rule.is_stated and (why := why_no_fusion(run, plan)):
        yield f"`fusion` has nothing to hide: {why}"


def held_positions(recipe: Recipe, shape: ModelShape) -> int:
    """Tokens of a sample that keys and values are to have room for: on a CPU those of the model, as memory is taken as
    it is written; on a GPU, where it is taken at once, no more than samples of the recipe have, those of evaluations
    among them."""
    most, prompt = shape.max_positions, recipe.data.max_prompt_tokens
    if recipe.device == "cpu" or prompt is None:
        return most
    evaluated = (
        ((one.source or recipe.data).max_prompt_tokens or most) + one.answering.max_response_tokens
        for one in evaluation_sets(recipe)
    )
    return min(most, max((prompt + recipe.sampling.max_response_tokens, *evaluated)))
