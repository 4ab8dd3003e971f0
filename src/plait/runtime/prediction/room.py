"""Whether what a plan is expected to hold has room where it runs: said by a dry run, and by a run before it begins.

A run is not refused for it: what is expected is of samples as long as they may be, and a plan that was stated is tried
as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from plait.cost.device_memory import DeviceMemory, memory_of_plan
from plait.cost.estimate import human_bytes
from plait.cost.lengths import SampleLengths
from plait.cost.placement import device_bytes_if_here
from plait.cost.working_memory import process_terms
from plait.errors import cause_of
from plait.memory_limits import limit
from plait.observe.screen import say
from plait.recipes.recipe import Recipe
from plait.runtime.prediction.predictable import Predictable
from plait.runtime.prediction.remedies import remedies
from plait.schedule.plan import Plan

NONE_JOINED: Mapping[str, int] = {}


def said_of_room(
    run: Predictable, plan: Plan, lengths: SampleLengths, joined_bytes: Mapping[str, int] = NONE_JOINED
) -> str | None:
    """What is too large, where, and which keys make it smaller; None: all of it has room, or no such device is here.

    Args:
        plan: completed.
        lengths: as of `memory_of_plan`.
        joined_bytes: name → memory of the machines that have joined this one.
    """
    recipe = run.recipe
    devices = memory_of_plan(recipe, run.flow, run.models, run.shapes, plan, lengths)
    fullest = max(devices, key=lambda device: device.expected_bytes)
    if recipe.device != "cpu":
        room = device_bytes_if_here(recipe, plan.cluster.devices)
        if room is None or fullest.expected_bytes <= room:
            return None
        needs = f"device {fullest.ranks[0]} is expected to hold {human_bytes(fullest.expected_bytes)}"
        return f"does not fit: {needs} of {human_bytes(room)}; {_remedies(fullest, recipe, plan)}"
    needed, (room, has) = max(_by_machine(devices, plan)), _least(joined_bytes)
    if needed <= room:
        return None
    per_node = plan.num_ranks // plan.nodes
    of = f"{per_node} ranks of a machine are together" if per_node > 1 else "the rank of a machine is"
    needs = f"{'the run is' if plan.num_ranks == 1 else of} expected to hold {human_bytes(needed)}, and {has}"
    return f"does not fit: {needs}; {_remedies(fullest, recipe, plan)}"


def warn_of_room(run: Predictable, plan: Plan, lengths: SampleLengths, joined_bytes: Mapping[str, int]) -> None:
    """Before a run begins, say to its user what `said_of_room` says."""
    try:
        lacking = said_of_room(run, plan, lengths, joined_bytes)
    except Exception as error:  # the boundary of the prediction: what is wrong with it keeps no run from its work
        say(f"nothing is known of the memory of this run: {type(error).__name__}: {cause_of(error)}", file=sys.stderr)
    else:
        if lacking is not None:
            say(f"memory {lacking}", file=sys.stderr)


def _least(joined_bytes: Mapping[str, int]) -> tuple[int, str]:
    """Memory of the machine with least of it, in bytes and in words."""
    own = limit()
    name, num_bytes = min(joined_bytes.items(), key=lambda machine: machine[1], default=("", own.bytes))
    if num_bytes >= own.bytes:
        return own.bytes, str(own)
    return num_bytes, f"{human_bytes(num_bytes)} is all that {name} has"


def _by_machine(devices: Sequence[DeviceMemory], plan: Plan) -> list[int]:
    """What the processes of each machine are expected to hold, each at its fullest: what a CPU has freed stays with
    them (`working_memory.keeps_freed`)."""
    machines = [0] * plan.nodes
    for device in devices:
        for rank in device.ranks:
            machines[rank * plan.nodes // plan.num_ranks] += device.expected_bytes
    return machines


def _remedies(device: DeviceMemory, recipe: Recipe, plan: Plan) -> str:
    process = process_terms(recipe.device, 2)
    rows = [(what, num_bytes) for what, num_bytes in device.rows if what not in process]
    what, _ = max(rows, key=lambda row: row[1])
    more = "a machine with more memory" if recipe.device == "cpu" else None
    helps = remedies(what, plan.num_ranks, more=more, adapted=recipe.lora.rank > 0)
    return f"the largest part is {what}: {helps}"
