"""Inner loops of the schedule search, compiled by numba where it is installed and plain Python where it is not.

Both give the same numbers (a test compares them): the loops use no library calls and a generator of their own. A
schedule is one array `order` of action numbers, rank after rank; its memory is a function of the order alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.schedule.tables import Floats, Ints, Tables

try:
    from numba import njit
except ImportError:

    def njit(**_: Any) -> Any:
        return lambda function: function


TOLERANCE = 1e-9
"""Relative slack in comparisons of times and of memory: sums of floats in another order must not decide."""


@njit(cache=True)
def uniform(state: Ints) -> float:
    """The next number in (0, 1) of L'Ecuyer's combined generator (1988); `state` is two integers, changed in place."""
    state[0] = (40014 * state[0]) % 2147483563
    state[1] = (40692 * state[1]) % 2147483399
    return ((state[0] - state[1]) % 2147483562 + 1) / 2147483563.0


@njit(cache=True)
def evaluate(t: Tables, order: Ints, limit: float, end: Floats, scratch: Ints) -> float:
    """Run the order; return its makespan, or inf if it deadlocks or surely ends after `limit`.

    end: [n] receives the end of every action; scratch: [3 N] working space
    """
    num_ranks = t.row_start.shape[0] - 1
    for action in range(end.shape[0]):
        end[action] = -1.0
    for rank in range(num_ranks):
        scratch[rank] = t.row_start[rank]
        scratch[num_ranks + rank] = rank
    stack = num_ranks
    makespan = 0.0
    done = 0
    while stack > 0:
        stack -= 1
        rank = scratch[num_ranks + stack]
        cursor = scratch[rank]
        stop = t.row_start[rank + 1]
        free = end[order[cursor - 1]] if cursor > t.row_start[rank] else 0.0
        while cursor < stop:
            action = order[cursor]
            before = t.before[action]
            if before >= 0:
                ready = end[before]
                if ready < 0.0:
                    break
                free = max(free, ready)
            free += t.seconds[action]
            if free + t.tail_s[action] > limit:
                return np.inf
            end[action] = free
            cursor += 1
            done += 1
            after = t.after[action]
            if after >= 0:
                other = t.rank[after]
                if other != rank and scratch[other] < t.row_start[other + 1] and order[scratch[other]] == after:
                    scratch[num_ranks + stack] = other
                    stack += 1
        scratch[rank] = cursor
        makespan = max(makespan, free)
    return makespan if done == order.shape[0] else np.inf


@njit(cache=True)
def peaks(t: Tables, order: Ints, peak: Floats) -> float:
    """Fill `peak` [N] with the most memory that each rank holds; return the largest."""
    largest = 0.0
    for rank in range(t.row_start.shape[0] - 1):
        held = 0.0
        most = 0.0
        for slot in range(t.row_start[rank], t.row_start[rank + 1]):
            held += t.memory[order[slot]]
            most = max(most, held)
        peak[rank] = most
        largest = max(largest, most)
    return largest


@njit(cache=True)
def dispatch(t: Tables, weights: Floats, cap: Floats, limit: float, order: Ints, end: Floats) -> float:
    """Build a schedule without needless idling: a free rank takes the ready action of least priority value.

    weights: [G, 5] for each group (model and direction): offset, slope per micro-batch, weight of the tail,
             in-flight limit as a multiple of the stage's depth, and as an addend
    cap:     [N] a forward waits while the rank would hold more
    Returns the makespan, or inf if forwards held back by a limit block everything or the end comes after `limit`.
    order, end: [n] receive the result.
    """
    num_ranks = t.row_start.shape[0] - 1
    num_chains = t.chain_start.shape[0] - 1
    head = t.chain_start[:num_chains].copy()
    cursor = t.row_start[:num_ranks].copy()
    free = np.zeros(num_ranks)
    held = np.zeros(num_ranks)
    earliest = np.full(num_ranks, -1.0)
    slack = TOLERANCE * max(1.0, np.abs(t.memory).max())
    for action in range(end.shape[0]):
        end[action] = -1.0
    makespan = 0.0
    for _ in range(order.shape[0]):
        rank = -1
        for v in range(num_ranks):
            if earliest[v] < 0.0:
                earliest[v] = np.inf
                for k in range(t.rank_chain_start[v], t.rank_chain_start[v + 1]):
                    action = _next_of(t, t.rank_chains[k], weights, cap[v] + slack, held[v], head, end)
                    if action >= 0:
                        ready = end[t.before[action]] if t.before[action] >= 0 else 0.0
                        earliest[v] = min(earliest[v], max(free[v], ready))
            if rank < 0 or earliest[v] < earliest[rank]:
                rank = v
        now = earliest[rank]
        if now == np.inf:
            return np.inf
        chosen = -1
        least = np.inf
        for k in range(t.rank_chain_start[rank], t.rank_chain_start[rank + 1]):
            c = t.rank_chains[k]
            action = _next_of(t, c, weights, cap[rank] + slack, held[rank], head, end)
            if action >= 0 and (t.before[action] < 0 or end[t.before[action]] <= now):
                g = t.chain_group[c]
                value = weights[g, 0] + weights[g, 1] * t.index[action] - weights[g, 2] * t.tail_s[action]
                if value < least:
                    least = value
                    chosen = action
        end[chosen] = now + t.seconds[chosen]
        if end[chosen] + t.tail_s[chosen] > limit:
            return np.inf
        makespan = max(makespan, end[chosen])
        free[rank] = end[chosen]
        held[rank] += t.memory[chosen]
        head[t.chain[chosen]] += 1
        order[cursor[rank]] = chosen
        cursor[rank] += 1
        earliest[rank] = -1.0
        if t.after[chosen] >= 0:
            earliest[t.rank[t.after[chosen]]] = -1.0
    return makespan


@njit(cache=True)
def _next_of(t: Tables, c: int, weights: Floats, cap: float, held: float, head: Ints, end: Floats) -> int:
    """The next action of chain `c` if it may start as far as its predecessor and the limits go, else −1."""
    action = head[c]
    if action == t.chain_start[c + 1] or (t.before[action] >= 0 and end[t.before[action]] < 0.0):
        return -1
    if t.memory[action] > 0.0 and held + t.memory[action] > cap:
        return -1
    g = t.chain_group[c]
    if g % 2 == 0:
        in_flight = t.index[action] - (head[c + 1] - t.chain_start[c + 1])
        if in_flight >= max(1.0, np.floor(t.chain_depth[c] * weights[g, 3] + weights[g, 4] + 0.5)):
            return -1
    return action


@njit(cache=True)
def anneal(
    t: Tables,
    order: Ints,
    cap: Floats,
    bound: float,
    moves: int,
    hot: float,
    cold: float,
    state: Ints,
    best: Ints,
) -> tuple[float, int]:
    """Shorten a schedule by simulated annealing on critical arcs; return (best makespan, moves made).

    A critical arc is a pair of neighbours on a rank that lies on a longest path; swapping one never makes a cycle
    (van Laarhoven et al. 1992). One move in ten reorders at random. `order` is the valid start and is changed;
    `best` receives the best order. Temperature falls from `hot` to `cold` (seconds). Stops at `bound`.
    """
    n = order.shape[0]
    scratch = np.zeros(3 * (t.row_start.shape[0] - 1), np.int64)
    end = np.zeros(n)
    trial_end = np.zeros(n)
    slot_of = np.zeros(n, np.int64)
    for slot in range(n):
        slot_of[order[slot]] = slot
    current = evaluate(t, order, np.inf, end, scratch)
    shortest = current
    best[:] = order
    goal = bound * (1 + TOLERANCE)
    temperature = hot
    cooling = (cold / hot) ** (1.0 / max(moves, 1))
    for move in range(moves):
        if shortest <= goal:
            return shortest, move
        temperature *= cooling
        source, target = -1, -1
        if uniform(state) < 0.9:
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


@njit(cache=True)
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


@njit(cache=True)
def _excess(t: Tables, order: Ints, rank: int, goal: float) -> float:
    held = 0.0
    total = 0.0
    for slot in range(t.row_start[rank], t.row_start[rank + 1]):
        held += t.memory[order[slot]]
        if held > goal:
            total += held - goal
    return total


@njit(cache=True)
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


@njit(cache=True)
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
    held = 0.0
    if most < np.inf:
        for k in range(first, source + (1 if step > 0 else 0)):
            held += t.memory[order[k]]
    while slot != target:
        other = order[slot + step]
        if t.chain[other] == chain or other == t.before[action] or other == t.after[action]:
            break
        if most < np.inf:
            if step > 0:
                if held - t.memory[action] + t.memory[other] > most:
                    break
                held += t.memory[other]
            else:
                held -= t.memory[other]
                if held + t.memory[action] > most:
                    break
        slot += step
    return slot


@njit(cache=True)
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
