"""Why no plan of a recipe has room on its devices, and what would help: seen before a search, or from what came nearest
in one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.errors import ConfigError
from plait.runtime.prediction.remedies import gib, remedies

if TYPE_CHECKING:
    from plait.planner.plan_leaders import State
    from plait.planner.plan_search import SearchResult
    from plait.runtime.prediction.planning import Planning


def check_processes(planning: Planning) -> None:
    """Raises ConfigError where no device has room for more than a process: no search is needed to see that."""
    most = max(map(planning.cluster.memory_of, range(planning.cluster.num_devices)))
    process = sum(planning.costs.process_terms.values())
    if process >= most:
        raise ConfigError(
            f"no plan on {_devices_of(planning)} has room for anything: the process of each takes {gib(process)} by "
            "itself; take fewer devices, or devices with more memory"
        )


def _devices_of(planning: Planning) -> str:
    """How many, and of what size, in words."""
    devices = planning.cluster.num_devices
    sizes = sorted({planning.cluster.memory_of(rank) for rank in range(devices)})
    return f"{devices} device{'s' * (devices > 1)} of {' to '.join(gib(size) for size in (sizes[0], *sizes[1:][-1:]))}"


def misfit(planning: Planning, result: SearchResult) -> str:
    """Why no plan can be used, which part of the memory is too large, and what would help."""
    if why := too_large(planning):
        return why
    devices, where = planning.cluster.num_devices, _devices_of(planning)
    if result.nearest is None:
        return f"no plan on {where} was found"
    if result.nearest.valued.idle:
        return f"no plan on {where} was found that uses all of them: {_idle(planning, result.nearest.places)}"
    memory = planning.predict(planning.plan_of(result.nearest.places, "nearest")).memory
    worst = max(memory, key=lambda rank: rank.peak_bytes / rank.limit_bytes)
    process = planning.costs.process_terms
    beside = {what: count for what, count in worst.terms.items() if what not in process}
    what, count = max(beside.items(), key=lambda item: item[1])
    held = sum(process.values())
    more = "more devices" if held < worst.limit_bytes / 2 else "devices with more memory"
    helps = remedies(what, devices, more=more, adapted=planning.recipe.lora.rank > 0)
    return (
        f"no plan on {where} was found that fits: the closest one needs {gib(worst.peak_bytes)} on rank "
        f"{worst.rank}, of which the process takes {gib(held)} and {what} {gib(count)}; {helps}"
    )


def too_large(planning: Planning) -> str:
    """The first call that has no room even by itself, and why; empty: each has some."""
    for number, slot in enumerate(planning.graph.slots):
        if not any(planning.space.forms.of(number, ranks) for ranks in planning.space.meshes):
            what, least = f"{slot.role} ({slot.mode})", _least(planning, number)
            return f"no plan on {_devices_of(planning)} has room for {what}, however it is sharded: {least}"
    return ""


def _idle(planning: Planning, places: State) -> str:
    """The first rank that has nothing to do, and what would help."""
    used = 0
    for place in places:
        used |= place.mask
    rank = next(rank for rank in range(planning.cluster.num_devices) if not used >> rank & 1)
    device = planning.cluster.device_of(rank)
    process = sum(planning.costs.process_terms.values())
    return (
        f"the closest plan uses nothing of rank {rank}, {device.name} of {gib(device.memory_bytes)}, of which the "
        f"process takes {gib(process)}; take fewer devices, devices with more memory, or a smaller model"
    )


def _least(planning: Planning, number: int) -> str:
    """What a slot takes of a device at least, by itself, and what would make its larger part smaller, or the part that
    has no room even alone."""
    slot, space = planning.graph.slots[number], planning.space
    form = space.forms.smallest(number, max(space.meshes, key=len))
    held = "weights and optimizer state" if slot.mode == "train" else "weights"
    cache = "KV cache and packed weights" if planning.workload.packed else "KV cache"
    beside = cache if slot.mode == "decode" else "activations and logits"
    taken = f"{gib(form.static_bytes)} of {held} and {gib(form.active_bytes)} of {beside} at least"
    process, devices = sum(planning.costs.process_terms.values()), planning.cluster.num_devices
    room = max(map(planning.cluster.memory_of, range(devices))) - process
    larger = held if form.static_bytes >= min(form.active_bytes, room) else slot.mode
    helps = remedies(larger, devices, adapted=planning.recipe.lora.rank > 0)
    return f"{taken}, beside {gib(process)} of the process; {helps}"
