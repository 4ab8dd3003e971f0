"""Whether GPUs that generate keep pools of keys and values, and CUDA graphs, from one rollout to the next."""

from __future__ import annotations

from plait.schedule.plan import Plan


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
