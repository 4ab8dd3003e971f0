"""What leaves a GPU for host memory while it idles, where a plan by name says nothing of it and all of it does not fit;
and what stays though it idles, where there is room for it.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from plait.cost.device_memory import memory_by_device
from plait.cost.placed import Facts
from plait.recipes.engine_checks import abilities
from plait.schedule.kept_pools import pools_stay
from plait.schedule.plan import POOL, Placement, Plan, PolicyChoice

POOL_MARGIN = 0.1
"""Share of a device's memory that is to be free beside pools that stay, at the fullest moment and with all that may
come on top: what a forecast does not know must not end a run that would fit without them."""

Leaves = Callable[[Placement], bool]


def with_pools(facts: Facts) -> Plan:
    """The plan of `facts`, which is completed, with the policy `pool` where that saves captures of CUDA graphs; else as
    it is."""
    plan = facts.plan
    decoding = [p for p in plan.placements if p.mode == "decode"]
    has_graphs = bool(decoding) and all(p.after == "keep" for p in decoding)
    is_ours = facts.recipe.device == "cuda" and not abilities(facts.recipe).computes_elsewhere
    if not (has_graphs and is_ours) or pools_stay(plan):
        return plan
    return replace(plan, policies=(*plan.policies, PolicyChoice(POOL)))


def has_margin(facts: Facts, room_bytes: float) -> bool:
    """Whether every device of this size has room for all that it may hold, but for `POOL_MARGIN`."""
    most = max(device.most_bytes for device in memory_by_device(facts))
    return most <= (1 - POOL_MARGIN) * room_bytes


def with_pools_kept(facts: Facts, room_bytes: float) -> Plan:
    """As `with_pools`, where every device has room for pools and graphs beside all that it may hold, but for
    `POOL_MARGIN`; else the plan of `facts` as it is.

    Args:
        room_bytes: of one device.
    """
    kept = with_pools(facts)
    return kept if kept is facts.plan or has_margin(replace(facts, plan=kept), room_bytes) else facts.plan


def with_idle_away(facts: Facts, room_bytes: float) -> Plan:
    """The plan of `facts` itself where every device has room for all that stays; else with what idles away, as little
    of it as makes it fit: optimizer states, then models that are never trained, then all that generate nothing. Where
    nothing makes it fit, the plan of these whose fullest device holds least.

    Args:
        facts: its plan is completed, and keeps everything.
        room_bytes: of one device.
    """
    if facts.recipe.lora.rank:
        return facts.plan  # all roles share weights, which are always in use
    needed: dict[int, Plan] = {}
    for plan in _candidates(facts):
        most = max(device.expected_bytes for device in memory_by_device(replace(facts, plan=plan)))
        if most <= room_bytes:
            return plan
        needed.setdefault(most, plan)
    return needed[min(needed)]


def with_all_kept(plan: Plan) -> Plan:
    """The plan as it was before anything left."""
    return replace(plan, placements=tuple(replace(placement, after="keep") for placement in plan.placements))


def leaving_text(plan: Plan) -> str:
    """What of a plan leaves its device, in words; empty where nothing does."""
    leaving = dict.fromkeys(f"{p.call} ({p.mode})" for p in plan.placements if p.after == "offload")
    return ", ".join(leaving)


def _candidates(facts: Facts) -> Iterator[Plan]:
    """From all that stays to all that leaves."""
    trained = {model.role for model in facts.models if model.changes}
    generating = {p.role for p in facts.plan.placements if p.mode == "decode"}
    steps: tuple[Leaves, ...] = (
        lambda p: False,
        lambda p: p.mode == "train",
        lambda p: p.mode == "train" or p.role not in trained | generating,
        lambda p: p.mode == "train" or p.role not in generating,
    )
    for leaves in steps:
        placements = tuple(replace(p, after="offload") if leaves(p) else p for p in facts.plan.placements)
        yield replace(facts.plan, placements=placements)
