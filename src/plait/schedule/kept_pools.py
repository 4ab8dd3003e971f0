"""Where an engine keeps its memory while it has nothing to generate: packed weights, on a GPU the pool of keys and
values, and CUDA graphs."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from plait.schedule.placements import RolePlacement
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
    return sum(any(rank in layout.mesh.ranks for layout in place.generate) for place in places.values()) == 1


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
    """Whether each GPU that generates keeps its pool and its graphs from one rollout to the next: it does nothing else,
    or the plan says so.

    Args:
        plan: completed.
    """
    if plan.keeps_pools:
        return True
    generating: dict[str, set[int]] = {}
    others = {rank for p in plan.placements if p.mode in ("train", "score") for rank in p.ranks}
    for p in plan.placements:
        if p.mode == "decode":
            generating.setdefault(p.role, set()).update(p.ranks)
    alone = sum(map(len, generating.values())) == len(set().union(*generating.values()))
    return bool(generating) and alone and others.isdisjoint(*generating.values())
