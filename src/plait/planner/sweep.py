"""The engine of the schedule search for workloads under memory caps: many partial schedules grow side by side.

Under tight caps the good schedules lie far apart: exchanging neighbours, or moving a micro-batch, leads from one to the
next only through schedules that do not fit. Here each partial schedule is grown by every action that may come next in
the order of time, and of all that are grown the `width` most promising stay. Nothing else is left out but what cannot
end before the limit, and what another partial schedule with the same actions placed is never later than. So a sweep
that had room for all has proven that no schedule ends before the limit.
"""

# numpy's annotations do not say that an array indexed by numbers gives a number.
# pyright: reportArgumentType=false, reportReturnType=false, reportAssignmentType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.compiled import njit
from plait.planner.kernels import TOLERANCE, most_held, safe, uniform
from plait.planner.tables import Floats, Ints, Tables


class Partials(NamedTuple):
    """Partial schedules, one per row. W rows, n actions, C chains, N ranks."""

    head: Ints
    """[W, C] next action of each chain; the end of the chain where all are placed."""
    free: Floats
    """[W, N] end of each rank's last action."""
    held: Floats
    """[W, N] memory that each rank holds."""
    left: Floats
    """[W, N] seconds of the actions that each rank has still to do."""
    end: Floats
    """[W, n] end of every placed action; −1 of the others."""
    clock: Floats
    """[W] start of the last action placed: none that comes starts earlier."""
    code: Ints
    """[W] equal where the same actions are placed."""


class Grown(NamedTuple):
    """What may follow the rows of one generation. K = W · C."""

    row: Ints
    action: Ints
    promise: Floats
    """[K] the least is kept first."""


class Sweep:
    """One sweep, which `leg` carries on.

    Args:
        t: the workload.
        limit: only schedules that end by it are looked for.
        width: partial schedules kept.
        weight: how much the mean of the ranks' earliest ends counts beside the latest of them.
        state: of the random numbers that decide between equally promising ones; changed.
    """

    def __init__(self, t: Tables, limit: float, width: int, weight: float, state: Ints) -> None:
        n, num_chains, num_ranks = len(t.rank), len(t.chain_start) - 1, len(t.cap)
        self.t, self.limit, self.width, self.weight, self.state = t, limit, width, weight, state
        self.depth = 0
        self.rows = 1
        self.cut = False
        """Whether anything was left out for want of room."""
        self._now, self._next = (
            Partials(
                np.zeros((width, num_chains), np.int64),
                np.zeros((width, num_ranks)),
                np.zeros((width, num_ranks)),
                np.zeros((width, num_ranks)),
                np.full((width, n), -1.0),
                np.zeros(width),
                np.zeros(width, np.int64),
            )
            for _ in range(2)
        )
        self._now.head[0] = t.chain_start[:-1]
        self._now.left[0] = np.bincount(t.rank, t.seconds, num_ranks)
        room = width * num_chains
        self._grown = Grown(np.zeros(room, np.int64), np.zeros(room, np.int64), np.zeros(room))
        self._parent = np.zeros((n, width), np.int32)
        self._placed = np.zeros((n, width), np.int32)
        self._marks = np.asarray([1 + int(uniform(state) * 2**40) for _ in range(num_chains)], np.int64)
        self._table = np.zeros(1 << (4 * width).bit_length(), np.int64)

    @property
    def bytes_of_a_row(self) -> int:
        arrays = (*self._now, *self._next, *self._grown, self._table, self._parent, self._placed)
        return sum(array.nbytes for array in arrays) // self.width

    @property
    def ended(self) -> bool:
        return self.rows == 0 or self.depth == len(self.t.rank)

    def leg(self, most: int) -> int:
        """Place further actions until about `most` partial schedules were tried; returns how many were."""
        tried = 0
        while tried < most and not self.ended:
            count = grow(self.t, self._now, self.rows, self.limit, self.weight, self.state, self._grown)
            tried += count
            self.rows, cut = keep(
                self.t, self._now, self._next, self._grown, count, self._marks, self._table,
                self._parent[self.depth], self._placed[self.depth],
            )  # fmt: skip
            self.cut = self.cut or cut
            self._now, self._next = self._next, self._now
            self.depth += 1
        return tried

    def order(self) -> Ints | None:
        """The shortest schedule of those that were completed; None if the sweep died out."""
        if self.rows == 0:
            return None
        t = self.t
        order = np.zeros(len(t.rank), np.int64)
        slot = t.row_start[1:].copy()
        row = int(np.argmin(self._now.free[: self.rows].max(axis=1)))
        for depth in reversed(range(self.depth)):
            action = self._placed[depth, row]
            slot[t.rank[action]] -= 1
            order[slot[t.rank[action]]] = action
            row = self._parent[depth, row]
        return order


@njit()
def grow(t: Tables, now: Partials, rows: int, limit: float, weight: float, state: Ints, grown: Grown) -> int:
    """Fill `grown` with every action that may come next in each of the first `rows` of `now`; return how many.

    An action starts when its rank is free, its predecessor has ended, and not before the last one that was placed. What
    cannot end by `limit`, finds no memory, or would leave no way to finish the micro-batches in flight is left out.
    """
    num_chains, num_ranks = t.chain_start.shape[0] - 1, t.cap.shape[0]
    full, _ = most_held(t.cap)
    spare, oldest = np.zeros(num_ranks), np.zeros(t.pipe_start.shape[0] - 1, np.int64)
    count = 0
    for w in range(rows):
        head, free, held, left, end, clock = (
            now.head[w],
            now.free[w],
            now.held[w],
            now.left[w],
            now.end[w],
            now.clock[w],
        )
        for c in range(num_chains):
            action = head[c]
            if action == t.chain_start[c + 1]:
                continue
            before = t.before[action]
            ready = end[before] if before >= 0 else 0.0
            if ready < 0.0:
                continue
            rank = t.rank[action]
            takes = t.memory[action] > 0.0
            if takes and held[rank] + t.memory[action] > full[rank]:
                continue
            start = max(ready, free[rank], clock)
            latest = start + t.seconds[action] + t.tail_s[action]
            total = 0.0
            for v in range(num_ranks):
                ends = start + left[v] if v == rank else max(free[v], start) + left[v] if left[v] > 0.0 else free[v]
                latest = max(latest, ends)
                total += ends
            if latest > limit or (takes and not safe(t, head, held, full, action, spare, oldest)):
                continue
            grown.row[count] = w
            grown.action[count] = action
            grown.promise[count] = latest + weight * total / num_ranks + TOLERANCE * limit * uniform(state)
            count += 1
    return count


@njit()
def keep(
    t: Tables, now: Partials, then: Partials, grown: Grown, count: int, marks: Ints, table: Ints,
    parent: NDArray[np.int32], placed: NDArray[np.int32],
) -> tuple[int, bool]:  # fmt: skip
    """Fill `then` with the most promising of what was grown; return how many, and whether some found no room.

    What is never earlier than one with the same actions placed is dropped. marks: [C] random numbers, whose sum says
    which actions are placed; table: [a power of two] working space; parent, placed: [W] receive where each row is from.
    """
    width = then.clock.shape[0]
    mask = table.shape[0] - 1
    table[:] = -1
    same = np.full(width, -1, np.int64)
    kept = np.int64(0)  # a plain 0 is of a type of its own, for which what is called here would be compiled once more
    for k in np.argsort(grown.promise[:count], kind="mergesort"):
        w, action = grown.row[k], grown.action[k]
        rank, chain, before = t.rank[action], t.chain[action], t.before[action]
        start = max(now.end[w, before] if before >= 0 else 0.0, now.free[w, rank], now.clock[w])
        code = now.code[w] + marks[chain]
        place = code & mask
        while table[place] >= 0 and then.code[table[place]] != code:
            place = (place + 1) & mask
        if kept == width:
            return kept, True
        _place(t, now, then, w, kept, action, start)
        then.code[kept] = code
        other = table[place]
        while other >= 0 and not _no_later(t, then, other, kept):
            other = same[other]
        if other >= 0:
            continue
        same[kept] = table[place]
        table[place] = kept
        parent[kept] = w
        placed[kept] = action
        kept += 1
    return kept, False


@njit()
def _place(t: Tables, now: Partials, then: Partials, w: int, row: int, action: int, start: float) -> None:
    rank = t.rank[action]
    then.head[row] = now.head[w]
    then.head[row, t.chain[action]] += 1
    then.free[row] = now.free[w]
    then.held[row] = now.held[w]
    then.held[row, rank] += t.memory[action]
    then.left[row] = now.left[w]
    then.left[row, rank] -= t.seconds[action]
    then.end[row] = now.end[w]
    then.end[row, action] = then.free[row, rank] = start + t.seconds[action]
    then.clock[row] = start


@njit()
def _no_later(t: Tables, rows: Partials, one: int, other: int) -> bool:
    """Whether `one`, with the same actions placed, can do all that `other` can at the same times or earlier."""
    slack = TOLERANCE * (1.0 + rows.clock[other])
    for v in range(rows.free.shape[1]):
        if max(rows.free[one, v], rows.clock[one]) > max(rows.free[other, v], rows.clock[other]) + slack:
            return False
    for c in range(rows.head.shape[1]):
        if rows.head[one, c] != rows.head[other, c]:
            return False
        # Every placed action of the chain before whose follower, in this chain, is not placed yet.
        for action in range(rows.head[one, c], t.chain_start[c + 1]):
            before = t.before[action]
            if before < 0:
                break
            ended = rows.end[one, before]
            if ended < 0.0:
                break
            rank = t.rank[action]
            if ended > max(rows.end[other, before], rows.free[other, rank], rows.clock[other]) + slack:
                return False
    return True
