"""Which ranks keep pools of keys and values, and CUDA graphs, from one rollout to the next: one rule, for what engines
do and for what is forecast."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from plait.schedule.placements import RolePlacement, placements_of
from plait.schedule.plan import Plan


def only_generates(rank: int, places: Mapping[str, RolePlacement], trained: Collection[str]) -> bool:
    """Whether a rank has nothing else to do than to generate for one role.

    Args:
        places: of every role.
        trained: the roles that are.
    """
    others = [place.score for place in places.values()]
    others += [place.train for role, place in places.items() if role in trained]
    if any(layout is not None and rank in layout.mesh.ranks for layout in others):
        return False
    return sum(place.instance_on(rank) is not None for place in places.values()) == 1


def keeps_memory(
    rank: int, plan: Plan, places: Mapping[str, RolePlacement], trained: Collection[str], device: str
) -> bool:
    """Whether the engine of a rank keeps its memory: the rank does nothing else, or the plan says that pools of GPUs
    stay.

    Args:
        places, trained: as of `only_generates`.
        device: cpu or cuda.
    """
    return only_generates(rank, places, trained) or (device == "cuda" and plan.keeps_pools)


def pools_stay(plan: Plan) -> bool:
    """Whether each GPU that generates keeps its memory, as of `keeps_memory`, where all roles that train are trained.

    Args:
        plan: completed.

    Raises:
        DataError: as of `placements.orders_of`.
    """
    places = {role: placements_of(plan, role) for role in dict.fromkeys(p.role for p in plan.placements)}
    trained = [role for role, place in places.items() if place.train is not None]
    generating = {rank for place in places.values() for layout in place.generate for rank in layout.mesh.ranks}
    return bool(generating) and all(keeps_memory(rank, plan, places, trained, "cuda") for rank in generating)
