"""Random pipeline schedules."""

from __future__ import annotations

import random

from plait.schedule.action import Action
from plait.schedule.pipeline import Workload
from plait.schedule.schedule import Schedule


def shuffled(workload: Workload, seed: int) -> Schedule:
    """A random valid schedule: any action whose turn it is, rank by rank."""
    draw = random.Random(seed)
    left = {action.id: action for action in workload.actions()}
    rows: list[list[Action]] = [[] for _ in range(workload.num_ranks)]
    done: set[str] = set()
    turn: dict[tuple, int] = {}
    while left:
        ready = [
            action
            for action in left.values()
            if set(action.waits) <= done
            and turn.get((action.kind, action.model, action.copy, action.stage), 0) == action.index
        ]
        action = draw.choice(ready)
        turn[action.kind, action.model, action.copy, action.stage] = action.index + 1
        done.add(action.id)
        rows[action.rank].append(left.pop(action.id))
    return Schedule(tuple(map(tuple, rows)), f"random {seed}")
