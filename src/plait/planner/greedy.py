"""The greedy fused schedule of RLHFuse: the start of its search, and a baseline of ours."""

from __future__ import annotations

import numpy as np

from plait.planner.tables import Ints, Tables, tables_of
from plait.schedule.pipeline import Workload


def greedy(workload: Workload, t: Tables | None = None) -> Ints | None:
    """RLHFuse's greedy order (paper notes A4); None when a memory cap makes it run into a deadlock.

    Again and again, of the next ready actions of all ranks take the one that can start first, backwards first among
    equals. An action of the smaller model stands back when it would end after an action of the larger model could
    start on its rank. The larger model is the one with more work on one micro-batch.
    """
    t = tables_of(workload) if t is None else t
    models = workload.models()
    weight = [0.0] * len(models)
    for p in workload.pipelines:
        weight[models.index(p.model)] = sum(row[0] for row in p.forward_s) + sum(row[0] for row in p.backward_s)
    large = weight.index(max(weight))
    num_ranks = workload.num_ranks
    chains = [t.rank_chains[t.rank_chain_start[v] : t.rank_chain_start[v + 1]].tolist() for v in range(num_ranks)]
    head = t.chain_start[:-1].tolist()
    stop = t.chain_start[1:].tolist()
    group = t.chain_group.tolist()
    before, after, seconds, memory = t.before.tolist(), t.after.tolist(), t.seconds.tolist(), t.memory.tolist()
    rank_of = t.rank.tolist()
    end = [-1.0] * len(seconds)
    free = [0.0] * num_ranks
    held_bytes = [0.0] * num_ranks
    rows: list[list[int]] = [[] for _ in range(num_ranks)]

    def choice(v: int) -> tuple[float, int, int, int] | None:
        """The rank's best next action as (start, 0 for backward, rank, action)."""
        ready = []
        first_large = float("inf")
        for c in chains[v]:
            a = head[c]
            if a == stop[c] or (before[a] >= 0 and end[before[a]] < 0):
                continue
            if memory[a] > 0 and held_bytes[v] + memory[a] > workload.caps[v] * (1 + 1e-12):
                continue
            start = max(free[v], end[before[a]] if before[a] >= 0 else 0.0)
            ready.append((start, 1 - group[c] % 2, v, a, group[c] // 2))
            if group[c] // 2 == large:
                first_large = min(first_large, start)
        kept = [r[:4] for r in ready if r[4] == large or r[0] + seconds[r[3]] <= first_large]
        return min(kept, default=None)

    best = [choice(v) for v in range(num_ranks)]
    for _ in range(len(seconds)):
        options = [option for option in best if option is not None]
        if not options:
            return None
        start, _, v, a = min(options)
        end[a] = free[v] = start + seconds[a]
        held_bytes[v] += memory[a]
        head[t.chain[a]] += 1
        rows[v].append(a)
        best[v] = choice(v)
        if after[a] >= 0:
            best[rank_of[after[a]]] = choice(rank_of[after[a]])
    return np.asarray([a for row in rows for a in row], np.int64)
