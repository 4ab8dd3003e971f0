"""Inner loops of the schedule search, compiled by numba where it is installed and plain Python where it is not.

Both give the same numbers (a test compares them): the loops use no library calls and a generator of their own. A
schedule is one array `order` of action numbers, rank after rank; its memory is a function of the order alone.
"""

# numpy's annotations do not say that an array indexed by numbers gives a number.
# pyright: reportArgumentType=false, reportReturnType=false, reportAssignmentType=false

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
             to finish the micro-batches in flight (`_safe`), so that caps never block everything
    Returns the makespan, or inf if in-flight limits block everything or the end comes after `limit`.
    order, end: [n] receive the result.
    """
    # Local names: reading a field of the tuple in the inner loop costs more than the rest of it.
    before, after, memory, seconds, tail_s = t.before, t.after, t.memory, t.seconds, t.tail_s
    chain_start, group, rank_of, rank_chains = t.chain_start, t.chain_group, t.rank, t.rank_chains
    first_of = t.rank_chain_start
    num_ranks = t.row_start.shape[0] - 1
    num_chains = chain_start.shape[0] - 1
    head = chain_start[:num_chains].copy()
    cursor = t.row_start[:num_ranks].copy()
    free = np.zeros(num_ranks)
    held = np.zeros(num_ranks)
    stale = np.ones(num_ranks, np.bool_)
    earliest = np.zeros(num_ranks)
    soonest_end = np.zeros(num_ranks)
    room = np.zeros(num_chains)
    unsafe = np.zeros(num_chains, np.bool_)
    any_unsafe = False
    full = np.zeros(num_ranks)
    spare = np.zeros(num_ranks)
    oldest = np.zeros(t.pipe_start.shape[0] - 1, np.int64)
    capped = False
    for v in range(num_ranks):
        full[v] = cap[v] * (1 + TOLERANCE) if cap[v] < np.inf else np.inf
        capped |= cap[v] < np.inf
    for action in range(end.shape[0]):
        end[action] = -1.0
    for c in range(num_chains):
        in_flight = np.floor(t.chain_depth[c] * weights[group[c], 3] + weights[group[c], 4] + 0.5)
        room[c] = max(1.0, in_flight) if group[c] % 2 == 0 else np.inf
    makespan = 0.0
    placed = 0
    while placed < order.shape[0]:
        rank = -1
        for v in range(num_ranks):
            if stale[v]:
                stale[v] = False
                earliest[v] = np.inf
                soonest_end[v] = np.inf
                for k in range(first_of[v], first_of[v + 1]):
                    c = rank_chains[k]
                    action = head[c]
                    if action == chain_start[c + 1] or unsafe[c]:
                        continue
                    ready = end[before[action]] if before[action] >= 0 else 0.0
                    if ready < 0.0 or (memory[action] > 0.0 and held[v] + memory[action] > full[v]):
                        continue
                    if room[c] < np.inf and head[c] - chain_start[c] - head[c + 1] + chain_start[c + 1] >= room[c]:
                        continue
                    start = max(free[v], ready)
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
        chosen = -1
        least = np.inf
        for k in range(first_of[rank], first_of[rank + 1]):
            c = rank_chains[k]
            action = head[c]
            if action == chain_start[c + 1] or unsafe[c]:
                continue
            ready = end[before[action]] if before[action] >= 0 else 0.0
            if ready < 0.0 or ready > until or (memory[action] > 0.0 and held[rank] + memory[action] > full[rank]):
                continue
            if room[c] < np.inf and head[c] - chain_start[c] - head[c + 1] + chain_start[c + 1] >= room[c]:
                continue
            g = group[c]
            value = weights[g, 0] + weights[g, 1] * (action - chain_start[c]) - weights[g, 2] * tail_s[action]
            value += bias[action]
            if value < least:
                least = value
                chosen = action
        if capped and memory[chosen] > 0.0 and not _safe(t, head, held, full, chosen, spare, oldest):
            unsafe[t.chain[chosen]] = True
            any_unsafe = True
            stale[rank] = True
            continue
        finish = max(free[rank], end[before[chosen]] if before[chosen] >= 0 else 0.0) + seconds[chosen]
        if finish + tail_s[chosen] > limit:
            return np.inf
        end[chosen] = finish
        makespan = max(makespan, finish)
        free[rank] = finish
        held[rank] += memory[chosen]
        head[t.chain[chosen]] += 1
        order[cursor[rank]] = chosen
        cursor[rank] += 1
        placed += 1
        stale[rank] = True
        if after[chosen] >= 0:
            stale[rank_of[after[chosen]]] = True
        if any_unsafe and memory[chosen] < 0.0:
            # Memory given back anywhere may make a forward safe again; memory taken never does.
            any_unsafe = False
            for c in range(num_chains):
                if unsafe[c]:
                    unsafe[c] = False
                    stale[rank_of[chain_start[c]]] = True
    return makespan


@njit(cache=True)
def _safe(t: Tables, head: Ints, held: Floats, full: Floats, action: int, spare: Floats, oldest: Ints) -> bool:
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


@njit(cache=True)
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


@njit(cache=True)
def evolve(
    t: Tables,
    cap: Floats,
    bound: float,
    memory_unit: float,
    candidates: int,
    state: Ints,
    pool: Floats,
    pool_score: Floats,
    found: Floats,
    best: Ints,
) -> int:
    """Evolve dispatch weights; return the number of candidates tried.

    Every pool keeps the weights that score best by makespan / bound + λ · peak / memory_unit with a λ of its own, so
    that short schedules and lean ones breed side by side. A fifth of the candidates is random, the others vary a
    member of a pool. Continues from the pools it is given.

    pool:       [L, E, 5 G + 2] weights of `dispatch` flattened, the cap as a multiple of memory_unit, the delay
    pool_score: [L, E] inf where empty
    found:      [2] makespan and peak of `best`; both and `best` change when a candidate is better in this order
    Stops when the makespan is at `bound` and the peak at `memory_unit`.
    """
    n = t.rank.shape[0]
    num_groups = (pool.shape[2] - 2) // 5
    bias = np.zeros(n)
    order = np.zeros(n, np.int64)
    end = np.zeros(n)
    peak = np.zeros(cap.shape[0])
    room = np.zeros(cap.shape[0])
    weights = np.zeros((num_groups, 5))
    genes = np.zeros(pool.shape[2])
    for tried in range(candidates):
        if found[0] <= bound * (1 + TOLERANCE) and found[1] <= memory_unit * (1 + TOLERANCE):
            return tried
        family = int(uniform(state) * pool.shape[0])
        _vary(t, pool, pool_score, family, bound, state, genes)
        for g in range(num_groups):
            for k in range(5):
                weights[g, k] = genes[5 * g + k]
        for rank in range(cap.shape[0]):
            room[rank] = min(cap[rank], genes[5 * num_groups] * memory_unit)
        makespan = dispatch(t, weights, bias, genes[5 * num_groups + 1], room, 1.2 * found[0], order, end)
        if makespan == np.inf:
            continue
        worst = peaks(t, order, peak)
        shorter = makespan < found[0] * (1 - TOLERANCE)
        if shorter or (makespan <= found[0] * (1 + TOLERANCE) and worst < found[1] * (1 - TOLERANCE)):
            found[0] = makespan
            found[1] = worst
            best[:] = order
        for f in range(pool.shape[0]):
            value = makespan / bound + LEANNESS[f] * worst / memory_unit
            last = 0
            for e in range(pool.shape[1]):
                if pool_score[f, e] == value:
                    last = -1
                    break
                if pool_score[f, e] > pool_score[f, last]:
                    last = e
            if last >= 0 and value < pool_score[f, last]:
                pool_score[f, last] = value
                pool[f, last] = genes
    return candidates


LEANNESS = (0.0, 0.02, 0.1, 0.3)
"""What a unit of peak memory costs in each family of `evolve`, in units of the bound."""


@njit(cache=True)
def _vary(t: Tables, pool: Floats, pool_score: Floats, family: int, bound: float, state: Ints, genes: Floats) -> None:
    """Fill `genes` with random weights, or with a varied copy of a random member of the family."""
    num_genes = genes.shape[0]
    member = int(uniform(state) * pool.shape[1])
    fresh = uniform(state) < 0.2 or pool_score[family, member] == np.inf
    unit = t.seconds[0]
    rate = 0.1 + 0.4 * uniform(state)
    for k in range(num_genes):
        if not fresh:
            genes[k] = pool[family, member, k]
            if uniform(state) > rate:
                continue
            if uniform(state) < 0.5:
                spread = 0.3 * uniform(state) ** 2
                genes[k] *= 1 + spread * (2 * uniform(state) - 1)
                continue
        u = uniform(state)
        sort = k % 5
        if k == num_genes - 1:
            genes[k] = max(0.0, 2 * u - 1)
        elif k == num_genes - 2:
            genes[k] = 0.9 + 1.6 * u
        elif sort == 0:
            genes[k] = (2 * u - 1) * bound * (0.0, 0.05, 0.2, 0.6)[int(uniform(state) * 4)]
        elif sort == 1:
            genes[k] = unit * 12 * u
        elif sort == 2:
            genes[k] = 4 * u - 2
        elif sort == 3:
            genes[k] = 0.5 + 2.5 * u
        else:
            genes[k] = 4 * u


@njit(cache=True)
def decode(t: Tables, keys: Floats, cap: Floats, limit: float, order: Ints, end: Floats) -> float:
    """Build the schedule in which actions are placed one by one, the possible one of least key first.

    keys: [n]; with the start times of a schedule that fits the caps as keys the result is that schedule. A forward
          that finds no memory, or whose memory the micro-batches in flight need (`_safe`), is put off: any keys give a
          schedule that fits.
    Returns the makespan, or inf if it is over `limit`. order, end: [n] receive the result.
    """
    before, after, memory, seconds, tail_s = t.before, t.after, t.memory, t.seconds, t.tail_s
    chain_start, rank_of = t.chain_start, t.rank
    num_ranks = t.row_start.shape[0] - 1
    num_chains = chain_start.shape[0] - 1
    head = chain_start[:num_chains].copy()
    cursor = t.row_start[:num_ranks].copy()
    free = np.zeros(num_ranks)
    held = np.zeros(num_ranks)
    blocked = np.zeros(num_chains, np.bool_)
    any_blocked = False
    full = np.zeros(num_ranks)
    spare = np.zeros(num_ranks)
    oldest = np.zeros(t.pipe_start.shape[0] - 1, np.int64)
    capped = False
    for v in range(num_ranks):
        full[v] = cap[v] * (1 + TOLERANCE) if cap[v] < np.inf else np.inf
        capped |= cap[v] < np.inf
    for action in range(end.shape[0]):
        end[action] = -1.0
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
                capped and not _safe(t, head, held, full, chosen, spare, oldest)
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
        end[chosen] = finish
        makespan = max(makespan, finish)
        free[rank] = finish
        held[rank] += memory[chosen]
        order[cursor[rank]] = chosen
        cursor[rank] += 1
        placed += 1
        action = head[first] = chosen + 1
        value[first] = np.inf
        if action < chain_start[first + 1] and (before[action] < 0 or end[before[action]] >= 0.0):
            value[first] = keys[action]
        action = after[chosen]
        if action >= 0 and head[t.chain[action]] == action:
            value[t.chain[action]] = keys[action]
    return makespan


@njit(cache=True)
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
