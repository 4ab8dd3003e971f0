"""How a schedule is run and built, compiled by numba where it is installed and plain Python where it is not.

Both give the same numbers (a test compares them): the loops use no library calls and a generator of their own. A
schedule is one array `order` of action numbers, rank after rank; its memory is a function of the order alone.

`dispatch` and `decode` are long because a call costs more than what they do for an action: numba counts references to
each array that it passes.
"""

# numpy's annotations do not say that an array indexed by numbers gives a number.
# pyright: reportArgumentType=false, reportReturnType=false, reportAssignmentType=false

from __future__ import annotations

import numpy as np

from plait.compiled import njit
from plait.planner.tables import Floats, Ints, Tables

TOLERANCE = 1e-9
"""Relative slack in comparisons of times and of memory: sums of floats in another order must not decide."""


@njit()
def uniform(state: Ints) -> float:
    """The next number in (0, 1) of L'Ecuyer's combined generator (1988); `state` is two integers, changed in place."""
    state[0] = (40014 * state[0]) % 2147483563
    state[1] = (40692 * state[1]) % 2147483399
    return ((state[0] - state[1]) % 2147483562 + 1) / 2147483563.0


@njit()
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


@njit()
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


@njit()
def dispatch(
    t: Tables, weights: Floats, bias: Floats, delay: float, cap: Floats, limit: float, order: Ints, end: Floats
) -> float:
    """Build a schedule by list scheduling: a rank takes the action of least priority value among those it may start.

    weights: [G, 5] for each group (model and direction): offset, slope per micro-batch, weight of the tail,
             in-flight limit as a multiple of the stage's depth, and as an addend
    bias:    [n] added to the priority value of each action
    delay:   0: a rank never idles while it could start something. 1: it may idle for an action that can start before
             another could end; with the right biases this reaches every active schedule (Giffler and Thompson 1960)
    cap:     [N] a forward waits while the rank would hold more; it also waits where its activation would leave no way
             to finish the micro-batches in flight (`safe`), so that caps never block everything
    Returns the makespan, or inf if in-flight limits block everything or the end comes after `limit`.
    order, end: [n] receive the result.
    """
    # Local names: reading a field of the tuple in the inner loop costs more than the rest of it.
    before, after, memory, seconds, tail_s = t.before, t.after, t.memory, t.seconds, t.tail_s
    chain_start, group, rank_of = t.chain_start, t.chain_group, t.rank
    rank_chains, first_of = t.rank_chains, t.rank_chain_start
    head, slot = chain_start[:-1].copy(), t.row_start[:-1].copy()
    free, held = np.zeros(cap.shape[0]), np.zeros(cap.shape[0])
    full, capped = most_held(cap)
    spare, oldest = np.zeros(cap.shape[0]), np.zeros(t.pipe_start.shape[0] - 1, np.int64)
    end[:] = -1.0
    room = _room(t.chain_depth, group, weights)
    ready = np.zeros(room.shape[0])
    unsafe = np.zeros(room.shape[0], np.bool_)
    any_unsafe = False
    stale = np.ones(cap.shape[0], np.bool_)
    earliest = np.zeros(cap.shape[0])
    soonest_end = np.zeros(cap.shape[0])
    makespan = 0.0
    placed = 0
    while placed < order.shape[0]:
        rank = -1
        for v in range(cap.shape[0]):
            if stale[v]:
                stale[v] = False
                earliest[v] = np.inf
                soonest_end[v] = np.inf
                for k in range(first_of[v], first_of[v + 1]):
                    c = rank_chains[k]
                    action = head[c]
                    ready[c] = np.inf
                    if action == chain_start[c + 1] or unsafe[c]:
                        continue
                    # In flight are the forwards of this chain less the backwards of the next.
                    if room[c] < np.inf and action - chain_start[c] - head[c + 1] + chain_start[c + 1] >= room[c]:
                        continue
                    if memory[action] > 0.0 and held[v] + memory[action] > full[v]:
                        continue
                    at = end[before[action]] if before[action] >= 0 else 0.0
                    if at < 0.0:
                        continue
                    ready[c] = at
                    start = max(free[v], at)
                    earliest[v] = min(earliest[v], start)
                    soonest_end[v] = min(soonest_end[v], start + seconds[action])
            if delay > 0.0:
                if rank < 0 or soonest_end[v] < soonest_end[rank]:
                    rank = v
            elif rank < 0 or earliest[v] < earliest[rank]:
                rank = v
        if earliest[rank] == np.inf:
            return np.inf
        until = earliest[rank] + delay * (soonest_end[rank] - earliest[rank]) * (1 - TOLERANCE)
        first = -1
        least = np.inf
        for k in range(first_of[rank], first_of[rank + 1]):
            c = rank_chains[k]
            if ready[c] <= until:
                action = head[c]
                g = group[c]
                value = weights[g, 0] + weights[g, 1] * (action - chain_start[c]) - weights[g, 2] * tail_s[action]
                value += bias[action]
                if value < least:
                    least = value
                    first = c
        chosen = head[first]
        stale[rank] = True
        if capped and memory[chosen] > 0.0 and not safe(t, head, held, full, chosen, spare, oldest):
            unsafe[first] = True
            any_unsafe = True
            continue
        finish = max(free[rank], ready[first]) + seconds[chosen]
        if finish + tail_s[chosen] > limit:
            return np.inf
        end[chosen] = free[rank] = finish
        makespan = max(makespan, finish)
        held[rank] += memory[chosen]
        head[first] += 1
        order[slot[rank]] = chosen
        slot[rank] += 1
        placed += 1
        if after[chosen] >= 0:
            stale[rank_of[after[chosen]]] = True
        if any_unsafe and memory[chosen] < 0.0:
            # Memory given back anywhere may make a forward safe again; memory taken never does.
            any_unsafe = False
            for c in range(room.shape[0]):
                if unsafe[c]:
                    unsafe[c] = False
                    stale[rank_of[chain_start[c]]] = True
    return makespan


@njit()
def _room(depth: Ints, group: Ints, weights: Floats) -> Floats:
    """[C] micro-batches that a chain of forwards may have in flight; inf for a chain of backwards."""
    room = np.full(group.shape[0], np.inf)
    for c in range(group.shape[0]):
        g = group[c]
        if g % 2 == 0:
            room[c] = max(1.0, np.floor(depth[c] * weights[g, 3] + weights[g, 4] + 0.5))
    return room


@njit()
def most_held(cap: Floats) -> tuple[Floats, bool]:
    """[N] the most memory that each rank may hold, with slack; whether any rank is limited."""
    full = np.full(cap.shape[0], np.inf)
    capped = False
    for v in range(cap.shape[0]):
        if cap[v] < np.inf:
            capped = True
            full[v] = cap[v] * (1 + TOLERANCE)
    return full, capped


@njit()
def safe(t: Tables, head: Ints, held: Floats, full: Floats, action: int, spare: Floats, oldest: Ints) -> bool:
    """Whether all micro-batches in flight could still be finished, one after the other, if `action` took its memory.

    The banker's algorithm (Dijkstra 1965). It is exact here: a micro-batch gives nothing back before it has taken all
    that it needs, so whichever gets everything first could have done so alone. spare: [N], oldest: [P] working space.
    """
    chain_start, memory, rank_of, pipe_start = t.chain_start, t.memory, t.rank, t.pipe_start
    num_pipes = pipe_start.shape[0] - 1
    for v in range(held.shape[0]):
        spare[v] = full[v] - held[v]
    spare[rank_of[action]] -= memory[action]
    chosen = t.chain[action]
    open_pipes = 0
    for p in range(num_pipes):
        first = pipe_start[p]
        oldest[p] = head[first + 1] - chain_start[first + 1]
        newest = head[first] - chain_start[first] + (1 if first == chosen else 0)
        open_pipes += 1 if oldest[p] < newest else 0
    while open_pipes > 0:
        moved = False
        for p in range(num_pipes):
            first = pipe_start[p]
            newest = head[first] - chain_start[first] + (1 if first == chosen else 0)
            i = oldest[p]
            if i >= newest:
                continue
            fits = True
            for c in range(first, pipe_start[p + 1], 2):
                taken = head[c] - chain_start[c] + (1 if c == chosen else 0)
                if taken <= i and memory[chain_start[c] + i] > spare[rank_of[chain_start[c]]]:
                    fits = False
                    break
            if not fits:
                continue
            for c in range(first, pipe_start[p + 1], 2):
                taken = head[c] - chain_start[c] + (1 if c == chosen else 0)
                if taken > i and head[c + 1] - chain_start[c + 1] <= i:
                    spare[rank_of[chain_start[c]]] += memory[chain_start[c] + i]
            oldest[p] += 1
            moved = True
            if oldest[p] >= newest:
                open_pipes -= 1
        if not moved:
            return False
    return True


@njit()
def decode(t: Tables, keys: Floats, cap: Floats, limit: float, order: Ints, end: Floats) -> float:
    """Build the schedule in which actions are placed one by one, the possible one of least key first.

    keys: [n]; with the start times of a schedule that fits the caps as keys the result is that schedule. A forward
          that finds no memory, or whose memory the micro-batches in flight need (`safe`), is put off: any keys give a
          schedule that fits.
    Returns the makespan, or inf if it is over `limit`. order, end: [n] receive the result.
    """
    before, after, memory, seconds, tail_s = t.before, t.after, t.memory, t.seconds, t.tail_s
    chain_start, chain_of, rank_of = t.chain_start, t.chain, t.rank
    head, slot = chain_start[:-1].copy(), t.row_start[:-1].copy()
    free, held = np.zeros(cap.shape[0]), np.zeros(cap.shape[0])
    full, capped = most_held(cap)
    spare, oldest = np.zeros(cap.shape[0]), np.zeros(t.pipe_start.shape[0] - 1, np.int64)
    end[:] = -1.0
    num_chains = chain_start.shape[0] - 1
    blocked = np.zeros(num_chains, np.bool_)
    any_blocked = False
    value = np.full(num_chains, np.inf)
    for c in range(num_chains):
        if before[head[c]] < 0:
            value[c] = keys[head[c]]
    makespan = 0.0
    placed = 0
    while placed < order.shape[0]:
        first = 0
        for c in range(1, num_chains):
            if value[c] < value[first]:
                first = c
        chosen = head[first]
        rank = rank_of[chosen]
        if memory[chosen] > 0.0:
            # Blocked until memory is given back: on this rank if it is full, anywhere if taking more is not safe.
            if held[rank] + memory[chosen] > full[rank] or (
                capped and not safe(t, head, held, full, chosen, spare, oldest)
            ):
                value[first] = np.inf
                blocked[first] = True
                any_blocked = True
                continue
        elif any_blocked:
            any_blocked = False
            for c in range(num_chains):
                if blocked[c]:
                    blocked[c] = False
                    value[c] = keys[head[c]]
        finish = free[rank]
        if before[chosen] >= 0:
            finish = max(finish, end[before[chosen]])
        finish += seconds[chosen]
        if finish + tail_s[chosen] > limit:
            return np.inf
        end[chosen] = free[rank] = finish
        makespan = max(makespan, finish)
        held[rank] += memory[chosen]
        order[slot[rank]] = chosen
        slot[rank] += 1
        placed += 1
        action = head[first] = chosen + 1
        value[first] = np.inf
        if action < chain_start[first + 1] and (before[action] < 0 or end[before[action]] >= 0.0):
            value[first] = keys[action]
        action = after[chosen]
        if action >= 0 and head[chain_of[action]] == action:
            value[chain_of[action]] = keys[action]
    return makespan
