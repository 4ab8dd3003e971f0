"""What it takes to train several roles by one schedule, each of which fills the gaps of the others (RLHFuse, fusion
inside a stage)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from plait.cost.costs import CallCost, Costs
from plait.cost.pipelines import IDLE
from plait.schedule.action import Kind
from plait.schedule.placements import is_fused, orders_of
from plait.schedule.plan import Plan
from plait.simulator.places import Place
from plait.simulator.static import simulate

STEP_TERMS = ("optimizer", "gradients", "new weights")
"""Terms of a training call that are its optimizer steps, as cost models name them."""


def idle_s(cost: CallCost) -> float:
    """Idle seconds of a pipeline, which another role that trains with it may use."""
    return sum(cost.terms.get(name, 0.0) for name in IDLE)


def taken_together_s(trained: Sequence[tuple[Place, Sequence[CallCost]]], orders: Mapping[str, float]) -> float:
    """Seconds in which roles train together.

    By a schedule that is known, as long as that takes. Else as long as RLHFuse's bound (paper notes A5), which searches
    of schedules nearly always reach: a rank has all roles' work to do, from when the first micro-batch of one of them
    may be there, and until the last one is back. And at least as long as the longest role by itself. The calls of one
    role pass its pipeline one behind the other, which is filled and drained once.

    Args:
        trained: of each role, where it trains, and its calls.
        orders: as of `shares_of`, of schedules that are known.
    """
    busy_s, steps_s, alone_s, ways = 0.0, 0.0, 0.0, []
    for place, costs in trained:
        work_s, empty_s = sum(cost.seconds - idle_s(cost) for cost in costs), max(map(idle_s, costs))
        busy_s, alone_s = busy_s + work_s, max(alone_s, work_s + empty_s)
        steps_s += sum(cost.terms.get(name, 0.0) for cost in costs for name in STEP_TERMS)
        ways.append(empty_s * place.ways)
    share = orders.get(trained[0][0].placements[0].schedule)
    if share is not None:
        return max(steps_s + share * (busy_s - steps_s), alone_s)
    return max(busy_s + float(np.minimum.reduce(ways).max()), alone_s)


def shares_of(plan: Plan, costs: Costs) -> dict[str, float]:
    """Schedule that the plan states for several roles → how long it takes, as a share of all work of the slowest stage
    of each of these roles; empty where an order is still to be found.

    Args:
        plan: completed.
    """
    shares = {}
    for schedule in filter(is_fused, plan.schedules):
        placements = {p.role: p for p in plan.placements if p.mode == "train" and p.schedule == schedule.name}
        if not placements:
            continue
        _, order = orders_of(plan, next(iter(placements.values())))
        assert order is not None, "a schedule of several roles is no order of theirs"
        counts = order.num_micro_batches
        stages = {role: costs.stage_seconds(p.call, p.layout, counts[role]) for role, p in placements.items()}
        seconds = {a.id: stages[a.model][a.stage][a.kind is Kind.BACKWARD] for a in schedule}
        work_s = sum(counts[role] * max(map(sum, of_role)) for role, of_role in stages.items())
        shares[schedule.name] = simulate(schedule, seconds).makespan_s / work_s
    return shares
