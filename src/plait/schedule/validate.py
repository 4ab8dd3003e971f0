"""Whether a schedule can run, and if not, which action stands in the way.

`validate` raises `DataError` at the first fault found, naming the action:

* ids: every action once, on the rank of its row, waiting for actions that exist
* order: micro-batches of a chain in order, which keeps the order of gradient sums; a backward after its forward
* dependencies: no action waits, over rows and waits, for itself; an acyclic schedule runs to its end when receives are
  posted ahead, whatever the order in which messages arrive
* memory: no rank holds more than its cap
* coverage, given a workload: exactly its actions, each on the rank of its stage with the waits of its pipeline
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.errors import DataError
from plait.schedule.action import Action, Kind
from plait.schedule.pipeline import Workload
from plait.schedule.schedule import Schedule


def validate(schedule: Schedule, workload: Workload | None = None) -> None:
    """Raise `DataError`, naming an action, unless the schedule can run, and does all of a given workload."""
    actions = _check_ids(schedule)
    if workload is not None:
        _check_coverage(actions, schedule, workload)
    _check_order(schedule)
    _check_cycles(schedule, actions)
    if workload is not None:
        _check_memory(schedule, workload)


def _check_ids(schedule: Schedule) -> dict[str, Action]:
    actions: dict[str, Action] = {}
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if action.id in actions:
                raise DataError(f"{action.id} is on rank {actions[action.id].rank} and again on rank {rank}")
            if action.rank != rank:
                raise DataError(f"{action.id} is for rank {action.rank} but is in the row of rank {rank}")
            actions[action.id] = action
    for action in actions.values():
        for wait in action.waits:
            if wait not in actions:
                raise DataError(f"{action.id} on rank {action.rank} waits for {wait}, which no rank runs")
    return actions


def _check_coverage(actions: Mapping[str, Action], schedule: Schedule, workload: Workload) -> None:
    if schedule.num_ranks != workload.num_ranks:
        raise DataError(f"expected rows for {workload.num_ranks} ranks, found {schedule.num_ranks}")
    wanted = {action.id: action for action in workload.actions()}
    missing = next((action for name, action in wanted.items() if name not in actions), None)
    if missing is not None:
        raise DataError(f"{missing.id} is missing; rank {missing.rank} should run it")
    for name, action in wanted.items():
        placed = actions[name]
        if placed.rank != action.rank:
            raise DataError(f"{name} is on rank {placed.rank}; its stage is on rank {action.rank}")
        if not set(action.waits) <= _ancestors(placed, actions):
            raise DataError(f"{name} should wait for {' and '.join(action.waits)}")
    for action in actions.values():
        if action.kind in (Kind.FORWARD, Kind.BACKWARD) and action.id not in wanted:
            raise DataError(f"{action.id} on rank {action.rank} is no action of the workload")


def _ancestors(action: Action, actions: Mapping[str, Action]) -> set[str]:
    """What the action waits for, seen through sends and receives."""
    waits = set(action.waits)
    for wait in action.waits:
        if actions[wait].kind.lane != "compute":
            waits |= _ancestors(actions[wait], actions)
    return waits


def _check_order(schedule: Schedule) -> None:
    for row in schedule.rows:
        last: dict[tuple[Kind, str, int, int], Action] = {}
        for action in row:
            if action.kind not in (Kind.FORWARD, Kind.BACKWARD) or action.index is None:
                continue
            chain = (action.kind, action.model, action.copy, action.stage)
            ahead = last.get(chain)
            if ahead is not None and ahead.index is not None and ahead.index >= action.index:
                raise DataError(f"{action.id} on rank {action.rank} comes after {ahead.id}: micro-batches keep order")
            last[chain] = action
            if action.kind is Kind.BACKWARD:
                forward = last.get((Kind.FORWARD, *chain[1:]))
                if forward is None or forward.index is None or forward.index < action.index:
                    raise DataError(f"{action.id} on rank {action.rank} comes before its forward")


def _check_cycles(schedule: Schedule, actions: Mapping[str, Action]) -> None:
    """Run all rows; what is left when nothing moves waits for itself."""
    lanes: list[list[Action]] = []
    for row in schedule.rows:
        by_lane: dict[str, list[Action]] = {}
        for action in row:
            # A receive is posted ahead and completes when its message comes, whatever stands before it.
            lane = action.id if action.kind.lane == "recv" else action.kind.lane
            by_lane.setdefault(lane, []).append(action)
        lanes.extend(by_lane.values())
    blocked = _run_lanes(lanes, lambda action, done: all(wait in done for wait in action.waits))
    if blocked:
        raise DataError(_explain(blocked, actions))


def _run_lanes(lanes: list[list[Action]], ready) -> list[Action]:
    """Run every lane as far as it goes; return the actions at which they stand still."""
    done: set[str] = set()
    cursor = [0] * len(lanes)
    moved = True
    while moved:
        moved = False
        for k, lane in enumerate(lanes):
            while cursor[k] < len(lane) and ready(lane[cursor[k]], done):
                done.add(lane[cursor[k]].id)
                cursor[k] += 1
                moved = True
    return [lane[cursor[k]] for k, lane in enumerate(lanes) if cursor[k] < len(lane)]


def _explain(blocked: list[Action], actions: Mapping[str, Action]) -> str:
    """Follow who waits for whom from the first action that stands still until it closes."""
    at_head = {(a.rank, a.kind.lane): a for a in blocked if a.kind.lane != "recv"}
    stuck = {action.id for action in blocked}
    links: list[str] = []
    seen: set[str] = set()
    action = blocked[0]
    while action.id not in seen and len(links) < 8:
        seen.add(action.id)
        wait = next((w for w in action.waits if _unmet(actions[w], at_head, stuck)), None)
        if wait is None:
            break
        head = at_head.get((actions[wait].rank, actions[wait].kind.lane), actions[wait])
        behind = "" if head.id == wait else f", which stands behind {head.id}"
        links.append(f"{action.id} on rank {action.rank} waits for {wait}{behind}")
        action = head if wait not in stuck else actions[wait]
    return "deadlock: " + "; ".join(links)


def _unmet(action: Action, at_head: Mapping[tuple[int, str], Action], stuck: set[str]) -> bool:
    return action.id in stuck or (action.rank, action.kind.lane) in at_head


def _check_memory(schedule: Schedule, workload: Workload) -> None:
    holds, caps = workload.holds(), workload.caps
    for rank, row in enumerate(schedule.rows):
        held = 0.0
        for action in row:
            held += holds.get(action.id, 0.0)
            if held > caps[rank] * (1 + 1e-9):
                raise DataError(f"{action.id} on rank {rank} makes it hold {held:g}, over its cap of {caps[rank]:g}")
