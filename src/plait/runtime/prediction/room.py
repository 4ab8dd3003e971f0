"""Whether what a plan is expected to hold has room where it runs: said by a dry run, and by a run before it begins.

A run is not refused for it: what is expected is of samples as long as they may be, and a plan that was stated is tried
as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.cost.device_memory import DeviceMemory, memory_of_plan
from plait.cost.estimate import human_bytes
from plait.cost.placement import device_bytes_if_here
from plait.cost.working_memory import process_terms
from plait.memory_limits import limit
from plait.runtime.prediction.remedies import remedies
from plait.runtime.prediction.run_planning import Foretellable
from plait.schedule.plan import Plan


def said_of_room(run: Foretellable, plan: Plan, longest_tokens: int) -> str | None:
    """What is too large, where, and which keys make it smaller; None: all of it has room, or no such device is here.

    Args:
        plan: completed.
        longest_tokens: as of `memory_of_plan`.
    """
    recipe = run.recipe
    devices = memory_of_plan(recipe, run.flow, run.models, run.shapes, plan, longest_tokens)
    fullest = max(devices, key=lambda device: device.expected_bytes)
    if recipe.device != "cpu":
        room = device_bytes_if_here(recipe, plan.cluster.devices)
        if room is None or fullest.expected_bytes <= room:
            return None
        needs = f"device {fullest.ranks[0]} is expected to hold {human_bytes(fullest.expected_bytes)}"
        return f"does not fit: {needs} of {human_bytes(room)}; {_remedies(fullest, recipe.device, 'more devices')}"
    needed, of_machine = max(_by_machine(devices, plan)), limit()
    if needed <= of_machine.bytes:
        return None
    per_node = plan.num_ranks // plan.nodes
    of = "the run is" if per_node == 1 else f"{per_node} ranks of a machine are together"
    needs = f"{of} expected to hold {human_bytes(needed)}, and {of_machine}"
    return f"does not fit: {needs}; {_remedies(fullest, recipe.device, 'a machine with more memory')}"


def _by_machine(devices: Sequence[DeviceMemory], plan: Plan) -> list[int]:
    """What the processes of each machine are expected to hold, each at its fullest: what a CPU has freed stays with
    them (`working_memory.keeps_freed`)."""
    machines = [0] * plan.nodes
    for device in devices:
        for rank in device.ranks:
            machines[rank * plan.nodes // plan.num_ranks] += device.expected_bytes
    return machines


def _remedies(device: DeviceMemory, kind: str, more: str) -> str:
    process = process_terms(kind, 2)
    rows = [(what, num_bytes) for what, num_bytes in device.rows if what not in process]
    what, _ = max(rows, key=lambda row: row[1])
    return f"the largest part is {what}: {remedies(what, more=more)}"
