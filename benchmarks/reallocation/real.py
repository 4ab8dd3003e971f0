"""One rank that moves a model's weights between two layouts by three ways, over gloo, on the same buffers.

    plait       `reallocation.mover.moving` of the plan, computed before
    broadcasts  ReaL's: one broadcast for each pair of shards that meet (see `strategies.broadcasts`), packed and
                scattered as ours are
    gather all  each shard whole, to every rank of the target that lacks it, then slices

The other two are given what they need beforehand: groups, places, and memory for all that they receive.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from plait.launch.worker_context import WorkerContext
from plait.layout.boxes import Box, Holding, Slice, aligned_slices
from plait.layout.decoder import decoder_parameters
from plait.layout.holdings import Holdings, weights
from plait.layout.mesh import Cluster, Layout
from plait.layout.move import plan_move
from plait.layout.params import Parameters
from plait.reallocation.memory import DTYPES, allocate, gather, paired_runs, part, runs, scatter
from plait.reallocation.mover import moving
from plait.schedule.work import to_the_end
from reallocation.cases import models

WAYS = ("plait", "broadcasts", "gather all")


@dataclass(frozen=True)
class Measured:
    """Of one way on one rank. seconds: of each repetition; received: bytes of one."""

    seconds: tuple[float, ...]
    received: int


class Worker:
    def __init__(self, context: WorkerContext, model: str, dtype: str) -> None:
        self.rank = context.rank
        self.size = context.num_ranks
        self.parameters = model_of(model)
        self.dtype = dtype
        self.groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        dist.init_process_group("gloo", store=context.store(), rank=self.rank, world_size=self.size)

    def close(self) -> None:
        dist.destroy_process_group()

    def measure(self, before: Layout, after: Layout, repeats: int) -> dict[str, Measured]:
        """After one untimed run of each way, whose result is checked; repetitions take turns."""
        source = weights(self.parameters, before, self.dtype, "before")
        target = weights(self.parameters, after, self.dtype, "after")
        buffers = allocate(source, self.rank) | allocate(target, self.rank)
        self.fill(buffers, source)
        ways = self.ways(source, target, buffers)
        received, seconds = {}, defaultdict(list)
        for way, run in ways.items():
            if "after" in buffers:
                buffers["after"].zero_()
            received[way] = run()
            self.check(buffers, target, way)
        for number in range(repeats):
            for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                dist.barrier()
                start = time.perf_counter()
                ways[way]()
                seconds[way].append(time.perf_counter() - start)
        return {way: Measured(tuple(seconds[way]), received[way]) for way in WAYS}

    def ways(self, source: Holdings, target: Holdings, buffers: dict[str, Tensor]) -> dict[str, Callable[[], int]]:
        plan = plan_move(source, target, Cluster(1, self.size))
        pairs = meetings(source, target)

        def plait() -> int:
            return sum(to_the_end(moving(plan, self.rank, buffers)).received.values())

        return {
            "plait": plait,
            "broadcasts": self.broadcasts(pairs, source, target, buffers),
            "gather all": self.gather_all(pairs, source, target, buffers),
        }

    def broadcasts(
        self, pairs: Pairs, source: Holdings, target: Holdings, buffers: dict[str, Tensor]
    ) -> Callable[[], int]:
        holders, needers = shards(source), shards(target)
        steps = []
        for (number, other), slices in pairs.items():
            senders, receivers = holders[number], needers[other]
            sender = next((rank for rank in senders if rank in receivers), senders[0])
            group = self.group({sender, *receivers})
            if self.rank == sender or self.rank in receivers:
                size = sum(origin.num_elements for origin, _ in slices)
                message = torch.empty(size, dtype=DTYPES[self.dtype])
                copies = paired_runs(*zip(*slices, strict=True))
                origins, goals = runs([pair[0] for pair in slices]), runs([pair[1] for pair in slices])
                alone = {sender, *receivers} == {sender}
                steps.append((sender, self.rank in receivers, alone, group, message, copies, origins, goals))

        def run() -> int:
            received = 0
            for sender, needs, alone, group, message, copies, origins, goals in steps:
                if self.rank == sender:
                    if not alone:
                        gather(buffers, origins, message)
                        dist.broadcast(message, sender, group)
                    if needs:
                        copy(buffers, copies)
                else:
                    dist.broadcast(message, sender, group)
                    received += message.numel() * message.itemsize
                    scatter(message, buffers, goals)
            return received

        return run

    def gather_all(
        self, pairs: Pairs, source: Holdings, target: Holdings, buffers: dict[str, Tensor]
    ) -> Callable[[], int]:
        steps, copies = [], []
        mine = next((number for number, ranks in enumerate(shards(target)) if self.rank in ranks), None)
        for number, senders in enumerate(shards(source)):
            others = [rank for rank in sorted(target.ranks) if rank not in senders]
            group = self.group({senders[0], *others})
            shard = buffers.get("before")
            if self.rank in others:
                shard = torch.empty(source.buffers[senders[0]]["before"], dtype=DTYPES[self.dtype])
            if others and self.rank in (senders[0], *others):
                steps.append((senders[0], group, shard))
            if mine is not None and (number, mine) in pairs:
                memory = {"before": shard, "after": buffers["after"]}
                copies.append((memory, paired_runs(*zip(*pairs[number, mine], strict=True))))

        def run() -> int:
            received = 0
            for sender, group, shard in steps:
                dist.broadcast(shard, sender, group)
                received += shard.numel() * shard.itemsize * (self.rank != sender)
            for memory, buffer in copies:
                copy(memory, buffer)
            return received

        return run

    def group(self, ranks: set[int]) -> dist.ProcessGroup | None:
        """Made once; all ranks ask for the same groups in the same order."""
        key = tuple(sorted(ranks))
        if key not in self.groups and len(key) > 1:
            group = dist.new_group(list(key))
            self.groups[key] = group if isinstance(group, dist.ProcessGroup) else None
        return self.groups.get(key)

    def fill(self, buffers: dict[str, Tensor], held: Holdings) -> None:
        for holding in held.ranks.get(self.rank, ()):
            place(buffers, holding).copy_(self.values(holding))

    def check(self, buffers: dict[str, Tensor], held: Holdings, way: str) -> None:
        for holding in held.ranks.get(self.rank, ()):
            assert torch.equal(place(buffers, holding), self.values(holding)), (
                f"{way}: {held.params[holding.param].name} differs"
            )

    def values(self, held: Holding) -> Tensor:
        """What a holding has: of every logical element a small number, exact in any dtype."""
        _, width, inner = self.parameters.params[held.param].grid
        (o0, o1, w0, w1, i0, i1), count = held.box, torch.arange
        at = (count(o0, o1)[:, None, None] * width + count(w0, w1)[:, None]) * inner + count(i0, i1)
        return ((at + 31 * held.param) % 251).to(DTYPES[self.dtype])


def model_of(name: str) -> Parameters:
    """A model of `cases`, or a tiny one to try the benchmark with."""
    if name == "tiny":
        return decoder_parameters(
            layers=4, hidden=32, intermediate=64, heads=8, kv_heads=4, head_dim=4, vocabulary=97, tied=True
        )
    return models()[name]


Pairs = dict[tuple[int, int], list[tuple[Slice, Slice]]]
"""(shard of the source, shard of the target) → where what they have in common lies in each"""


def shards(held: Holdings) -> list[list[int]]:
    """The ranks of each distinct shard."""
    ranks: dict[tuple[Holding, ...], list[int]] = {}
    for rank in sorted(held.ranks):
        ranks.setdefault(held.ranks[rank], []).append(rank)
    return list(ranks.values())


def meetings(source: Holdings, target: Holdings) -> Pairs:
    """Of blocks that several shards of the source hold (tied embeddings, shared heads) only the first is taken."""
    pairs: Pairs = defaultdict(list)
    for other, receivers in enumerate(shards(target)):
        seen: set[tuple[int, Box]] = set()
        goals = {holding.param: holding for holding in target.ranks[receivers[0]]}
        for number, senders in enumerate(shards(source)):
            for held in source.ranks[senders[0]]:
                goal = goals.get(held.param)
                if goal is None or (held.param, held.box) in seen:
                    continue
                low = [max(held.box[at], goal.box[at]) for at in (0, 2, 4)]
                high = [min(held.box[at], goal.box[at]) for at in (1, 3, 5)]
                if any(start >= stop for start, stop in zip(low, high, strict=True)):
                    continue
                seen.add((held.param, held.box))
                box = Box(low[0], high[0], low[1], high[1], low[2], high[2])
                pairs[number, other].append(aligned_slices(held, goal, box))
    return dict(pairs)


def place(buffers: dict[str, Tensor], holding: Holding) -> Tensor:
    return part(buffers[holding.buffer], Slice(holding.buffer, holding.offset, holding.box.shape, holding.strides))


def copy(buffers: dict[str, Tensor], pairs: list[tuple[Slice, Slice]]) -> None:
    for origin, goal in pairs:
        part(buffers[goal.buffer], goal).copy_(part(buffers[origin.buffer], origin))
