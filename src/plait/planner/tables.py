"""A workload as arrays for the compiled loops, and orders back as schedules."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.schedule.action import Kind
from plait.schedule.pipeline import Workload
from plait.schedule.schedule import Schedule

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Tables(NamedTuple):
    """A workload as arrays. n actions, C chains, N ranks.

    Action numbers run through the chains. A chain is the forwards, or the backwards, of one stage of one pipeline;
    its micro-batches keep their order, which keeps the order in which gradients are added up.

    seconds, memory:  [n] duration; change of the ledger (+ forward, − backward)
    rank, chain, place: [n] where it runs; its chain; how many of its chain come before it
    before, after:    [n] previous and next action of the same micro-batch, −1 at the ends
    tail_s:           [n] seconds of the same micro-batch that follow it
    row_start:        [N + 1] where the actions of each rank begin in an order
    cap:              [N] memory that a rank may hold
    chain_start:      [C + 1] first action of each chain; a chain of forwards is followed by that of its backwards
    chain_group:      [C] 2 · model + (1 for backward): which dispatch parameters apply
    chain_depth:      [C] stages from this one to the end of its pipeline, itself included
    rank_chain_start, rank_chains: [N + 1], [C] the chains of each rank
    pipe_start:       [P + 1] first chain of each pipeline; forwards of stage s are chain 2 s of it, backwards 2 s + 1
    """

    seconds: Floats
    memory: Floats
    rank: Ints
    chain: Ints
    place: Ints
    before: Ints
    after: Ints
    tail_s: Floats
    row_start: Ints
    cap: Floats
    chain_start: Ints
    chain_group: Ints
    chain_depth: Ints
    rank_chain_start: Ints
    rank_chains: Ints
    pipe_start: Ints


def tables_of(workload: Workload) -> Tables:
    """The arrays of a workload."""
    models = workload.models()
    chain_start, chain_group, chain_depth, chain_rank = [0], [], [], []
    seconds, memory, before, after, tail = [], [], [], [], []
    for p in workload.pipelines:
        count, depth = p.num_microbatches, p.num_stages
        base = chain_start[-1]
        for stage in range(depth):
            for backward in (0, 1):
                table = p.backward_s if backward else p.forward_s
                first = chain_start[-1]
                chain_start.append(first + count)
                chain_group.append(2 * models.index(p.model) + backward)
                chain_depth.append(depth - stage)
                chain_rank.append(p.ranks[stage])
                place = 2 * depth - 1 - stage if backward else stage
                for i in range(count):
                    seconds.append(table[stage][i])
                    memory.append(-p.activation[stage][i] if backward else p.activation[stage][i])
                    before.append(_along(base, count, depth, place - 1, i))
                    after.append(_along(base, count, depth, place + 1, i))
                    above = sum(p.backward_s[s][i] for s in range(stage))
                    if not backward:
                        above += sum(p.forward_s[s][i] for s in range(stage + 1, depth))
                        above += sum(p.backward_s[s][i] for s in range(stage, depth))
                    tail.append(above)
    lengths = np.diff(chain_start)
    chain = np.repeat(np.arange(len(lengths)), lengths)
    rank = np.asarray(chain_rank, np.int64)[chain]
    rows = np.bincount(rank, minlength=workload.num_ranks)
    by_rank = [[c for c, r in enumerate(chain_rank) if r == v] for v in range(workload.num_ranks)]
    return Tables(
        np.asarray(seconds, np.float64),
        np.asarray(memory, np.float64),
        rank,
        chain.astype(np.int64),
        np.arange(len(chain), dtype=np.int64) - np.asarray(chain_start, np.int64)[chain],
        np.asarray(before, np.int64),
        np.asarray(after, np.int64),
        np.asarray(tail, np.float64),
        np.concatenate(([0], np.cumsum(rows))).astype(np.int64),
        np.asarray(workload.caps, np.float64),
        np.asarray(chain_start, np.int64),
        np.asarray(chain_group, np.int64),
        np.asarray(chain_depth, np.int64),
        np.cumsum([0, *(len(chains) for chains in by_rank)]).astype(np.int64),
        np.asarray([c for chains in by_rank for c in chains], np.int64),
        np.cumsum([0, *(2 * p.num_stages for p in workload.pipelines)]).astype(np.int64),
    )


def order_of(workload: Workload, schedule: Schedule) -> Ints:
    """The action numbers of a schedule of this workload, rank after rank."""
    numbers = {_id: number for number, (_, _id) in enumerate(_numbered(workload))}
    return np.asarray([numbers[action.id] for action in schedule], np.int64)


def schedule_from(workload: Workload, t: Tables, order: Ints, name: str) -> Schedule:
    """The schedule of an order."""
    actions = [action for action, _ in _numbered(workload)]
    rows = [order[t.row_start[v] : t.row_start[v + 1]].tolist() for v in range(workload.num_ranks)]
    return Schedule(tuple(tuple(actions[number] for number in row) for row in rows), name)


def _numbered(workload: Workload):
    for p in workload.pipelines:
        for stage in range(p.num_stages):
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                for i in range(p.num_microbatches):
                    action = p.action(kind, stage, i)
                    yield action, action.id


def _along(base: int, count: int, depth: int, place: int, i: int) -> int:
    """The number of a micro-batch's action at a place of its way, down the forwards and up the backwards; −1 beyond."""
    if not 0 <= place < 2 * depth:
        return -1
    stage, backward = (place, 0) if place < depth else (2 * depth - 1 - place, 1)
    return base + (2 * stage + backward) * count + i
