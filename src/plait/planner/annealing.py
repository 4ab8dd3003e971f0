"""Engines of the schedule search that change one schedule move by move, compiled like the `kernels` they call: each
tries many moves in one call.

`anneal` and `wander` shorten a schedule, by its order and by the keys that it is built from; `squeeze` makes it hold
less.
"""

# numpy's annotations do not say that an array indexed by numbers gives a number.
# pyright: reportArgumentType=false, reportReturnType=false, reportAssignmentType=false

from __future__ import annotations

import numpy as np

from plait.compiled import njit
from plait.planner.kernels import TOLERANCE, decode, evaluate, uniform
from plait.planner.tables import Floats, Ints, Tables


@njit()
def anneal(
    t: Tables, order: Ints, cap: Floats, bound: float, moves: int, hot: float, cold: float, state: Ints, best: Ints
) -> tuple[float, int]:
    """Shorten a schedule by simulated annealing on critical arcs; return (best makespan, moves made).

    A critical arc is a pair of neighbours on a rank that lies on a longest path; swapping one never makes a cycle
    (van Laarhoven et al. 1992). Other moves reorder at random. `order` is a start that fits the caps and is changed;
    `best` receives the best order. Temperature falls from `hot` to `cold` (seconds). Stops at `bound`.
    """
    n = order.shape[0]
    scratch = np.zeros(3 * cap.shape[0], np.int64)
    end = np.zeros(n)
    trial_end = np.zeros(n)
    slot_of = np.zeros(n, np.int64)
    for slot in range(n):
        slot_of[order[slot]] = slot
    shortest = current = evaluate(t, order, np.inf, end, scratch)
    best[:] = order
    goal = bound * (1 + TOLERANCE)
    temperature = hot
    cooling = (cold / hot) ** (1.0 / max(moves, 1))
    for move in range(moves):
        if shortest <= goal:
            return shortest, move
        temperature *= cooling
        source, target = -1, -1
        if uniform(state) < 0.85:
            source = _critical_slot(t, order, slot_of, end, current, state)
            if source >= 0:
                target = source - 1
                if uniform(state) < 0.2:
                    target -= int(uniform(state) * 8)
        if source < 0:
            source = int(uniform(state) * n)
            target = source + int(uniform(state) * 17) - 8
        target = _reach(t, order, cap, source, target)
        if target == source:
            continue
        _shift(order, slot_of, source, target)
        limit = current - temperature * np.log(uniform(state))
        makespan = evaluate(t, order, limit * (1 + TOLERANCE), trial_end, scratch)
        if makespan == np.inf:
            _shift(order, slot_of, target, source)
            continue
        end, trial_end = trial_end, end
        current = makespan
        if current < shortest * (1 - TOLERANCE):
            shortest = current
            best[:] = order
    return shortest, moves


@njit()
def squeeze(
    t: Tables,
    order: Ints,
    goal: float,
    limit: float,
    moves: int,
    hot: float,
    cold: float,
    state: Ints,
    best: Ints,
) -> tuple[float, int]:
    """Lower the peak memory without a later end: anneal the excess over `goal`, makespan at most `limit`.

    The excess is the memory above `goal`, summed over all slots of all ranks; a forward is moved back or a backward
    ahead. Returns (least excess, moves made); `best` receives its order. Stops at an excess of zero.
    """
    n = order.shape[0]
    scratch = np.zeros(3 * (t.row_start.shape[0] - 1), np.int64)
    end = np.zeros(n)
    slot_of = np.zeros(n, np.int64)
    free = np.full(t.row_start.shape[0] - 1, np.inf)
    rows = np.zeros(t.row_start.shape[0] - 1)
    current = 0.0
    for slot in range(n):
        slot_of[order[slot]] = slot
    for rank in range(rows.shape[0]):
        rows[rank] = _excess(t, order, rank, goal)
        current += rows[rank]
    least = current
    best[:] = order
    temperature = hot
    cooling = (cold / hot) ** (1.0 / max(moves, 1))
    for move in range(moves):
        if least <= 0.0:
            return least, move
        temperature *= cooling
        source = int(uniform(state) * n)
        far = 1 + int(uniform(state) ** 2 * 12)
        relieve = t.memory[order[source]] > 0.0
        if uniform(state) < 0.35:
            relieve = not relieve
        target = _reach(t, order, free, source, source + far if relieve else source - far)
        if target == source:
            continue
        rank = t.rank[order[source]]
        _shift(order, slot_of, source, target)
        excess = _excess(t, order, rank, goal)
        after = current - rows[rank] + excess
        if after > current - temperature * np.log(uniform(state)) or evaluate(t, order, limit, end, scratch) == np.inf:
            _shift(order, slot_of, target, source)
            continue
        rows[rank] = excess
        current = after
        if current < least * (1 - TOLERANCE):
            least = current if current > 1e-6 else 0.0
            best[:] = order
    return least, moves


@njit()
def wander(
    t: Tables, keys: Floats, cap: Floats, bound: float, moves: int, hot: float, cold: float, state: Ints, best: Ints
) -> tuple[float, int]:
    """Shorten a schedule by annealing the keys from which `decode` builds it; return (makespan, moves made).

    Every schedule built fits the caps, so this engine goes where exchanges of neighbours find no way. A move changes
    the key of one action, or of all forwards, all backwards or all actions of one micro-batch. `keys` are start times
    and are changed; `best` receives the best order.
    """
    n = keys.shape[0]
    num_pipes = t.pipe_start.shape[0] - 1
    order = np.zeros(n, np.int64)
    end = np.zeros(n)
    trial = keys.copy()
    shortest = current = decode(t, keys, cap, np.inf, order, end)
    best[:] = order
    goal = bound * (1 + TOLERANCE)
    temperature = hot
    cooling = (cold / hot) ** (1.0 / max(moves, 1))
    for move in range(moves):
        if shortest <= goal:
            return shortest, move
        temperature *= cooling
        trial[:] = keys
        change = (2 * uniform(state) - 1) * current * uniform(state) ** 3
        if uniform(state) < 0.5:
            trial[int(uniform(state) * n)] += change
        else:
            first = t.pipe_start[int(uniform(state) * num_pipes)]
            last = first + 2 * t.chain_depth[first]
            i = int(uniform(state) * (t.chain_start[first + 1] - t.chain_start[first]))
            way = int(uniform(state) * 3)
            for c in range(first, last):
                if way == 2 or (c - first) % 2 == way:
                    trial[t.chain_start[c] + i] += change
        limit = current - temperature * np.log(uniform(state))
        makespan = decode(t, trial, cap, limit * (1 + TOLERANCE), order, end)
        if makespan == np.inf:
            continue
        current = makespan
        for action in range(n):
            keys[action] = end[action] - t.seconds[action]
        if current < shortest * (1 - TOLERANCE):
            shortest = current
            best[:] = order
    return shortest, moves


@njit()
def _excess(t: Tables, order: Ints, rank: int, goal: float) -> float:
    held_bytes = 0.0
    total = 0.0
    for slot in range(t.row_start[rank], t.row_start[rank + 1]):
        held_bytes += t.memory[order[slot]]
        if held_bytes > goal:
            total += held_bytes - goal
    return total


@njit()
def _critical_slot(t: Tables, order: Ints, slot_of: Ints, end: Floats, makespan: float, state: Ints) -> int:
    """A random slot whose action and the one before it on its rank are a critical arc; −1 if there is none."""
    slack = TOLERANCE * makespan
    action = -1
    seen = 0
    for rank in range(t.row_start.shape[0] - 1):
        if t.row_start[rank + 1] > t.row_start[rank]:
            last = order[t.row_start[rank + 1] - 1]
            if end[last] >= makespan - slack:
                seen += 1
                if uniform(state) * seen < 1.0:
                    action = last
    chosen = -1
    arcs = 0
    while action >= 0:
        start = end[action] - t.seconds[action]
        slot = slot_of[action]
        previous = order[slot - 1] if slot > t.row_start[t.rank[action]] else -1
        before = t.before[action]
        by_rank = previous >= 0 and end[previous] >= start - slack
        by_chain = before >= 0 and end[before] >= start - slack
        if by_rank and by_chain and previous != before and uniform(state) < 0.5:
            by_rank = False
        if by_rank:
            if previous != before and t.chain[previous] != t.chain[action]:
                arcs += 1
                if uniform(state) * arcs < 1.0:
                    chosen = slot
            action = previous
        else:
            action = before if by_chain else -1
    return chosen


@njit()
def _reach(t: Tables, order: Ints, cap: Floats, source: int, target: int) -> int:
    """How far towards `target` the action at `source` may go without passing its chain or filling its rank's memory."""
    action = order[source]
    rank = t.rank[action]
    first = t.row_start[rank]
    target = min(max(target, first), t.row_start[rank + 1] - 1)
    chain = t.chain[action]
    step = 1 if target > source else -1
    slot = source
    most = cap[rank] + TOLERANCE * max(1.0, abs(cap[rank])) if cap[rank] < np.inf else np.inf
    held_bytes = 0.0
    if most < np.inf:
        for k in range(first, source + (1 if step > 0 else 0)):
            held_bytes += t.memory[order[k]]
    while slot != target:
        other = order[slot + step]
        if t.chain[other] == chain or other == t.before[action] or other == t.after[action]:
            break
        if most < np.inf:
            if step > 0:
                if held_bytes - t.memory[action] + t.memory[other] > most:
                    break
                held_bytes += t.memory[other]
            else:
                held_bytes -= t.memory[other]
                if held_bytes + t.memory[action] > most:
                    break
        slot += step
    return slot


@njit()
def _shift(order: Ints, slot_of: Ints, source: int, target: int) -> None:
    """Move the action at `source` to `target`; those between move up."""
    action = order[source]
    step = 1 if target > source else -1
    slot = source
    while slot != target:
        order[slot] = order[slot + step]
        slot_of[order[slot]] = slot
        slot += step
    order[target] = action
    slot_of[action] = target
