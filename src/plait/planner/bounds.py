"""Lower bounds that no schedule of a workload can beat, and the ideals it is held against."""

from __future__ import annotations

import heapq

from plait.planner.tables import Tables, tables_of
from plait.schedule.pipeline import Workload


def lower_bound(workload: Workload) -> float:
    """The least makespan that a schedule could have.

    For each rank: every action has a head (the longest chain of work that must precede it) and a tail (what must
    follow). The bound is that of the rank alone, with preemption allowed (Jackson's preemptive schedule, Carlier
    1982). It is at least RLHFuse's bound, `max_v [min head + work(v) + min tail]`. Memory caps are ignored.
    """
    t = tables_of(workload)
    head, tail = _heads(t), _tails(t)
    bound = max((head[a] + t.seconds[a] + tail[a] for a in range(len(head))), default=0.0)
    for rank in range(workload.num_ranks):
        jobs = [(head[a], float(t.seconds[a]), tail[a]) for a in range(len(head)) if t.rank[a] == rank]
        bound = max(bound, _preemptive(jobs))
    return float(bound)


def memory_bound(workload: Workload) -> float:
    """The peak memory of each model's own 1F1B schedule, the larger of the two (RLHFuse A5): min(stages, micro-batches)
    activations of the first stage. A schedule may hold less, at the price of bubbles.
    """
    return max(
        sum(sorted(p.activation[0], reverse=True)[: min(p.num_stages, p.num_microbatches)]) for p in workload.pipelines
    )


def data_parallel_ideal(workload: Workload) -> float:
    """Seconds if all work were spread evenly over all ranks, as data parallelism would if each rank could hold the
    models, before its all-reduce. Fusion beats 1F1B, not this.
    """
    return sum(workload.work_s()) / workload.num_ranks


def _heads(t: Tables) -> list[float]:
    """Longest work before each action along micro-batches and chains."""
    head = [0.0] * len(t.seconds)
    for a in _by_chains(t):
        if t.before[a] >= 0:
            head[a] = head[t.before[a]] + float(t.seconds[t.before[a]])
        if t.place[a] > 0:
            head[a] = max(head[a], head[a - 1] + float(t.seconds[a - 1]))
    return head


def _tails(t: Tables) -> list[float]:
    tail = [0.0] * len(t.seconds)
    for a in reversed(_by_chains(t)):
        if t.after[a] >= 0:
            tail[a] = tail[t.after[a]] + float(t.seconds[t.after[a]])
        if a + 1 < len(tail) and t.chain[a + 1] == t.chain[a]:
            tail[a] = max(tail[a], tail[a + 1] + float(t.seconds[a + 1]))
    return tail


def _by_chains(t: Tables) -> list[int]:
    """All actions so that each comes after those of its micro-batch and of its chain that precede it."""
    place: dict[int, int] = {}
    order = sorted(range(len(t.seconds)), key=lambda a: int(t.place[a]))
    result = []
    for first in order:
        if t.before[first] < 0:
            action = first
            while action >= 0:
                place[action] = len(result)
                result.append(action)
                action = int(t.after[action])
    return result


def _preemptive(jobs: list[tuple[float, float, float]]) -> float:
    """Makespan of one machine for jobs (head, seconds, tail) with preemption: always run the longest tail."""
    waiting = sorted(jobs)
    ready: list[list[float]] = []
    now = latest = 0.0
    k = 0
    while k < len(waiting) or ready:
        if not ready:
            now = max(now, waiting[k][0])
        while k < len(waiting) and waiting[k][0] <= now:
            heapq.heappush(ready, [-waiting[k][2], waiting[k][1]])
            k += 1
        until = waiting[k][0] if k < len(waiting) else float("inf")
        job = ready[0]
        step = min(job[1], until - now)
        now += step
        job[1] -= step
        if job[1] <= 0:
            heapq.heappop(ready)
            latest = max(latest, now - job[0])
    return latest
