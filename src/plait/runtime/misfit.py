"""Why no plan fits, and what would help."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.planner.plan_search import SearchResult

if TYPE_CHECKING:
    from plait.runtime.planning import Planning


def misfit(planning: Planning, result: SearchResult) -> str:
    """Why no plan can be used, which part of the memory is too large, and what would help."""
    devices, limit = planning.cluster.num_devices, planning.cluster.device.memory_bytes
    for number, slot in enumerate(planning.graph.slots):
        if not any(planning.space.forms(number, ranks) for ranks in planning.space.meshes):
            return (
                f"no plan on {devices} devices of {_gib(limit)} has room for {slot.role} ({slot.mode}), however it is "
                f"cut; {_remedies(slot.mode)}"
            )
    if result.nearest is None:
        return f"no plan on {devices} devices was found"
    prediction = planning.predict(planning.plan_of(result.nearest.places, "nearest"))
    worst = max(prediction.memory, key=lambda rank: rank.peak_bytes)
    what, count = max(worst.terms.items(), key=lambda item: item[1])
    return (
        f"no plan on {devices} devices of {_gib(limit)} was found that fits: what comes nearest needs "
        f"{_gib(worst.peak_bytes)} on rank {worst.rank}, of which {what} takes {_gib(count)}; {_remedies(what)}"
    )


def _remedies(what: str) -> str:
    if "decode" in what:
        return "lower `sampling.max_running` or `sampling.max_response_tokens`, or take more devices"
    if "state" in what or "train" in what:
        keys = "`lora.rank`, `optimizer.shard_gradients`, or lower `micro_batch_tokens`"
        return f"take more devices, a smaller model, {keys}"
    return "take more devices, a smaller model, or lower `micro_batch_tokens`"


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
