"""The engine of the schedule search that breeds weights by which schedules are dispatched, compiled like the `kernels`
that it calls: it tries many schedules in one call."""

# numpy's annotations do not say that an array indexed by numbers gives a number.
# pyright: reportArgumentType=false, reportReturnType=false, reportAssignmentType=false

from __future__ import annotations

import numpy as np

from plait.compiled import njit
from plait.planner.kernels import TOLERANCE, dispatch, peaks, uniform
from plait.planner.tables import Floats, Ints, Tables

LEANNESS = (0.0, 0.02, 0.1, 0.3)
"""What a unit of peak memory costs in each family of `evolve`, in units of the bound."""


@njit()
def evolve(
    t: Tables,
    cap: Floats,
    bound: float,
    memory_unit: float,
    candidates: int,
    state: Ints,
    pool: Floats,
    pool_score: Floats,
    scores: Floats,
    best: Ints,
) -> int:
    """Evolve dispatch weights; return the number of candidates tried.

    Every pool keeps the weights that score best by makespan / bound + λ · peak / memory_unit with a λ of its own, so
    that short schedules and lean ones breed side by side. A fifth of the candidates is random, the others vary a
    member of a pool. Continues from the pools it is given.

    pool:       [L, E, 5 G + 2] weights of `dispatch` flattened, the cap as a multiple of memory_unit, the delay
    pool_score: [L, E] inf where empty
    scores:     [2] makespan and peak of `best`; both and `best` change when a candidate is better in this order
    Stops when the makespan is at `bound` and the peak at `memory_unit`.
    """
    num_genes = pool.shape[2]
    bias = np.zeros(t.rank.shape[0])
    order = np.zeros(t.rank.shape[0], np.int64)
    end = np.zeros(t.rank.shape[0])
    peak = np.zeros(cap.shape[0])
    room = np.zeros(cap.shape[0])
    genes = np.zeros(num_genes)
    weights = genes[: num_genes - 2].reshape((num_genes - 2) // 5, 5)  # a view: what `_vary` writes
    for tried in range(candidates):
        if scores[0] <= bound * (1 + TOLERANCE) and scores[1] <= memory_unit * (1 + TOLERANCE):
            return tried
        _vary(t, pool, pool_score, int(uniform(state) * pool.shape[0]), bound, state, genes)
        for rank in range(cap.shape[0]):
            room[rank] = min(cap[rank], genes[num_genes - 2] * memory_unit)
        makespan = dispatch(t, weights, bias, genes[num_genes - 1], room, 1.2 * scores[0], order, end)
        if makespan == np.inf:
            continue
        worst = peaks(t, order, peak)
        shorter = makespan < scores[0] * (1 - TOLERANCE)
        if shorter or (makespan <= scores[0] * (1 + TOLERANCE) and worst < scores[1] * (1 - TOLERANCE)):
            scores[0] = makespan
            scores[1] = worst
            best[:] = order
        _admit(pool, pool_score, genes, makespan / bound, worst, memory_unit)
    return candidates


@njit()
def _admit(pool: Floats, pool_score: Floats, genes: Floats, relative: float, worst: float, memory_unit: float) -> None:
    """Let `genes` take the place of the worst member of each family whose score they beat, unless one scores the same.

    relative: their makespan / bound; worst: their peak
    """
    for family in range(pool.shape[0]):
        value = relative + LEANNESS[family] * worst / memory_unit
        last = 0
        for member in range(pool.shape[1]):
            if pool_score[family, member] == value:
                last = -1
                break
            if pool_score[family, member] > pool_score[family, last]:
                last = member
        if last >= 0 and value < pool_score[family, last]:
            pool_score[family, last] = value
            pool[family, last] = genes


@njit()
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
