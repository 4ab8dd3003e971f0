"""What a run spends the memory of its GPUs on, as far as its recipe leaves that open."""

from __future__ import annotations

from dataclasses import replace

from plait.cost.lengths import SampleLengths
from plait.cost.model_parameters import parameters_of
from plait.cost.placed import Facts
from plait.cost.placement import device_bytes
from plait.cost.spent_memory import KEYS, with_memory_spent
from plait.observe.loading import loading
from plait.runtime.inputs.prepared import Outline
from plait.schedule.plan import Plan


def spending(run: Outline, plan: Plan, lengths: SampleLengths, *, may_leave: bool) -> Outline:
    """The run with a recipe that states how long micro-batches are, and whether activations are kept, on GPUs; says
    what was found. On CPUs as it is.

    Args:
        plan: completed.
        may_leave: as of `spent_memory.with_memory_spent`.
    """
    recipe = run.recipe
    if recipe.device != "cuda" or all(map(recipe.states, KEYS)):
        return run
    facts = Facts(recipe, run.models, run.shapes, parameters_of(run.models), plan, run.flow, lengths)
    found = with_memory_spent(facts, device_bytes(recipe, plan.cluster.devices), may_leave=may_leave)
    how = "recomputed in the backward" if found.checkpoint_activations else "kept for the backward"
    loading(f"micro-batches of up to {found.micro_batch_tokens} tokens, whose activations are {how}")
    return replace(run, recipe=found)
