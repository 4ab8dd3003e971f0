"""The worker of these tests: one rank that executes moves and holds every element against what it has to be.

It returns plain values; the tests are about those. A value for every logical element is a function of the parameter
and the dtype, so every rank knows the whole model and none is ever sent for comparison.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from plait.launch.worker_context import WorkerContext
from plait.layout.boxes import Holding, Slice
from plait.layout.caches import CacheShape, cache, cache_parameters
from plait.layout.decoder import decoder_parameters
from plait.layout.holdings import Holdings, merged, weights, zero_shards
from plait.layout.mesh import Cluster, Layout, Mesh, Parallelism
from plait.layout.move import plan_move
from plait.layout.move_plan import MoveKind, MovePlan
from plait.layout.shards import check
from plait.reallocation.communicator import Channel, Communicator, Message
from plait.reallocation.memory import DTYPES, allocate, part
from plait.reallocation.mover import MoveReport, moving
from plait.reallocation.saving import SavedFiles, loading, saving
from plait.schedule.work import to_the_end
from tests.layout.nests import nested
from tests.reallocation.live_memory import LiveMemory

SMALL = decoder_parameters(
    layers=4, hidden=12, intermediate=10, heads=8, kv_heads=2, head_dim=3, vocabulary=37, tied=True, cut_vocabulary=True
)
"""Grouped heads (with tp 4 two ranks share each), a tied embedding, a vocabulary that divides by nothing."""

DTYPE_CYCLE = ("float32", "bfloat16", "float64", "float16")


def layouts_on(ranks: Sequence[int]) -> list[Layout]:
    """Every legal (dp, tp, pp) of the small model on these ranks."""
    found = []
    for sizes in Parallelism.all_of(len(ranks)):
        layout = Layout(Mesh(tuple(ranks)), sizes)
        check(SMALL, layout)
        found.append(layout)
    return found


def layouts_of(cluster: Cluster) -> list[Layout]:
    """On every legal mesh of the cluster: pairs of them are on equal, overlapping and disjoint ranks."""
    return [layout for mesh in cluster.legal_meshes() for layout in layouts_on(mesh.ranks)]


def values_of(held: Holdings, dtype: str) -> list[Tensor]:
    """The elements of every parameter, in its grid and in `dtype`."""
    found = []
    for number, param in enumerate(held.params):
        draw = torch.Generator().manual_seed(number)
        if DTYPES[dtype].is_floating_point:
            values = torch.randn(param.num_elements, dtype=torch.float64, generator=draw).float()
        else:
            values = torch.randint(0, 256, (param.num_elements,), generator=draw)
        found.append(values.to(DTYPES[dtype]).view(param.grid))
    return found


def held_part(buffers: Mapping[str, Tensor], held: Holding) -> Tensor:
    return part(buffers[held.buffer], Slice(held.buffer, held.offset, held.box.shape, held.strides))


def cut(values: Tensor, held: Holding) -> Tensor:
    box = held.box
    return values[box.outer : box.outer_stop, box.start : box.stop, box.inner : box.inner_stop]


@dataclass(frozen=True)
class Outcome:
    """What one move did on one rank."""

    wrong: int
    """Holdings of source or target that are not, bit by bit, what they have to be; buffers in which nothing is found
    written, though it was (`Tensor._version`)."""
    bytes_differ: str
    """See `differing`."""
    transient_over: bool
    """Whether more than two buckets were allocated besides the buffers, for messages or by any operator."""


def differing(plan: MovePlan, rank: int, report: MoveReport) -> str:
    """Empty where each link of the rank carried what was planned."""
    planned = {link: size for link, size in plan.traffic.link_bytes.items() if rank in link}
    found = {(rank, peer): size for peer, size in report.sent.items()}
    found |= {(peer, rank): size for peer, size in report.received.items()}
    return "" if found == planned else f"planned {planned}, found {found}"


class Worker:
    def __init__(self, context: WorkerContext) -> None:
        self.rank = context.rank
        self.size = context.num_ranks
        self.context = context
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=context.store(), rank=self.rank, world_size=self.size)

    def close(self) -> None:
        dist.destroy_process_group()

    def move(self, source: Holdings, target: Holdings, cluster: Cluster, **options: int) -> Outcome:
        """Plan and execute one move; values of the source in the target's dtype are the truth."""
        return self.carry_out(plan_move(source, target, cluster, **options), source, target)

    def carry_out(self, plan: MovePlan, source: Holdings, target: Holdings) -> Outcome:
        buffers = allocate(target, self.rank) | allocate(source, self.rank)
        before = values_of(source, source.dtype)
        for held in source.ranks.get(self.rank, ()):
            held_part(buffers, held).copy_(cut(before[held.param], held))
        row = [action for action in plan.rows.get(self.rank, ()) if action.kind in (MoveKind.COPY, MoveKind.RECV)]
        versions = {piece.buffer: buffers[piece.buffer]._version for action in row for piece in action.target}
        with LiveMemory(buffers) as live:
            report = to_the_end(moving(plan, self.rank, buffers, Channel(deadline_s=20.0), name="test"))
        after = [values.to(DTYPES[target.dtype]) for values in before]
        wrong = self.count_wrong(buffers, target, after) + self.count_wrong(buffers, source, before)
        wrong += sum(buffers[name]._version == was for name, was in versions.items())
        return Outcome(wrong, differing(plan, self.rank, report), live.peak_bytes > 2 * plan.bucket_bytes)

    def count_wrong(self, buffers: Mapping[str, Tensor], held: Holdings, values: Sequence[Tensor]) -> int:
        mine = held.ranks.get(self.rank, ())
        return sum(not torch.equal(held_part(buffers, one), cut(values[one.param], one)) for one in mine)

    def all_pairs(self, cluster: Cluster) -> tuple[int, list[str]]:
        """(pairs of layouts, what went wrong in them). Messages are short, so that chunks are forwarded in rounds."""
        found = layouts_of(cluster)
        wrong, count = [], 0
        for before in found:
            for after in found:
                dtype = DTYPE_CYCLE[count % len(DTYPE_CYCLE)]
                source, target = weights(SMALL, before, dtype, "before"), weights(SMALL, after, dtype, "after")
                bucket_bytes = (1 << 20, 4096)[count % 2]
                outcome = self.move(source, target, cluster, bucket_bytes=bucket_bytes, chunk_bytes=512)
                if outcome.wrong or outcome.bytes_differ or outcome.transient_over:
                    wrong.append(f"{before} to {after}: {outcome}")
                count += 1
        return count, wrong

    def masters_to_weights(self, before: Layout, after: Layout, dtype: str) -> Outcome:
        """ZeRO-1 masters to training and generation weights, these two nested in one memory."""
        training, generation = nested([weights(SMALL, before, dtype, "one"), weights(SMALL, after, dtype, "other")])
        return self.move(zero_shards(SMALL, before, "float32"), merged([training, generation]), Cluster(1, self.size))

    def masters_to_masters(self, before: Layout, after: Layout) -> Outcome:
        """What a resume under another plan does, and back into the wider dtype."""
        source, target = zero_shards(SMALL, before, "bfloat16", "before"), zero_shards(SMALL, after, "float32", "after")
        return self.move(source, target, Cluster(1, self.size), bucket_bytes=2048, chunk_bytes=256)

    def cache(self, shape: CacheShape, lengths: Sequence[int], before: Layout, after: Layout) -> Outcome:
        """Keys and values of samples that migrate to an instance of another tp."""
        params = cache_parameters(shape, lengths)
        source, target = (
            cache(params, shape, [layout] * len(lengths), "bfloat16", name)
            for layout, name in ((before, "before"), (after, "after"))
        )
        return self.move(source, target, Cluster(1, self.size), chunk_bytes=64)

    def save(self, folder: Path, layout: Layout, dtype: str) -> list[int]:
        """Bytes of each thing that was written: weights and masters, in one folder."""
        cluster, found = Cluster(1, self.size), []
        for name, held in self.saved(layout, dtype).items():
            buffers = allocate(held, self.rank)
            values = values_of(held, held.dtype)
            for one in held.ranks.get(self.rank, ()):
                held_part(buffers, one).copy_(cut(values[one.param], one))
            if self.rank in held.ranks:
                records = list(saving(held, cluster, self.rank, buffers, SavedFiles(folder, name), bucket_bytes=4096))
                found += [record.bytes for record in records]
        dist.barrier()
        return found

    def load(self, folder: Path, layout: Layout, dtype: str, saved_dtype: str) -> list[int]:
        """Wrong holdings after a load of what `save` wrote, of weights and of masters."""
        cluster, wrong = Cluster(1, self.size), []
        for name, held in self.saved(layout, dtype).items():
            buffers = allocate(held, self.rank)
            for _ in loading(held, cluster, self.rank, buffers, SavedFiles(folder, name), bucket_bytes=4096):
                pass
            stored = saved_dtype if name == "weights" else "float32"
            values = [each.to(DTYPES[held.dtype]) for each in values_of(held, stored)]
            wrong.append(self.count_wrong(buffers, held, values))
        return wrong

    def saved(self, layout: Layout, dtype: str) -> dict[str, Holdings]:
        return {"weights": weights(SMALL, layout, dtype), "masters": zero_shards(SMALL, layout, "float32")}

    def several_at_once(self) -> list[int]:
        """Wrong holdings of moves over one group that take turns, round by round, begun by each rank in an order of
        its own."""
        cluster = Cluster(1, self.size)
        one, other = Layout.on(range(self.size), tp=self.size), Layout.on(range(self.size), dp=self.size)
        runs, first_tag = [], 0
        for number, (before, after) in enumerate(((one, other), (other, one), (one, other))):
            source, target = weights(SMALL, before, "float32", "before"), weights(SMALL, after, "float32", "after")
            plan = plan_move(source, target, cluster, chunk_bytes=128)
            buffers = allocate(source, self.rank) | allocate(target, self.rank)
            values = [each * (number + 1) for each in values_of(source, "float32")]
            for held in source.ranks[self.rank]:
                held_part(buffers, held).copy_(cut(values[held.param], held))
            steps = moving(plan, self.rank, buffers, Channel(None, 20.0, first_tag), name=f"move{number}")
            first_tag += plan.traffic.num_messages
            runs.append((plan, steps, buffers, target, values))
        # The first action of each is a copy, which waits for nobody; messages are posted with it.
        for _, steps, *_ in runs if self.rank % 2 else runs[::-1]:
            assert next(steps).kind == MoveKind.COPY.name
        for number in range(max(plan.num_rounds for plan, *_ in runs)):
            for plan, steps, *_ in runs:
                for action in plan.rows[self.rank][1:]:
                    if action.round == number:
                        assert next(steps).kind == action.kind.name
        assert all(next(steps, None) is None for _, steps, *_ in runs)
        return [self.count_wrong(buffers, target, values) for *_, buffers, target, values in runs]

    def actions(self) -> tuple[list[tuple[str, str, int, int]], list[str], list[int]]:
        """Records of a move by steps, what was waited for, and how many messages were posted before each record."""
        waits: list[str] = []
        posted: list[Message] = []

        def waiting_for(what: str) -> AbstractContextManager[None]:
            waits.append(what)
            return self.context.waiting_for(what)

        layout = Layout.on(range(self.size), tp=self.size)
        source = weights(SMALL, layout, "float32", "before")
        target = weights(SMALL, Layout.on(range(self.size), dp=self.size), "float32", "after")
        plan = plan_move(source, target, Cluster(1, self.size), chunk_bytes=512)
        buffers = allocate(source, self.rank) | allocate(target, self.rank)
        steps = moving(plan, self.rank, buffers, Channel(waiting_for=waiting_for), name="actor")
        post, records, counts = Communicator.post, [], []

        def counted(link: Communicator, messages: Sequence[Message]) -> None:
            posted.extend(messages)
            post(link, messages)

        Communicator.post = counted
        try:
            for record in steps:
                did = plan.rows[self.rank][len(records)]
                records.append((record.action, did.kind.value, did.peer, record.bytes))
                counts.append(len(posted))
        finally:
            Communicator.post = post
        assert [action.kind.value for action in plan.rows[self.rank]] == [kind for _, kind, _, _ in records]
        return records, waits, counts

    def lost_peer(self, victim: int, after: int, signal_number: int, deadline_s: float) -> str:
        """One rank sends itself a signal after so many messages; the others return their errors."""
        cluster = Cluster(1, self.size)
        source = weights(SMALL, Layout.on(range(self.size), tp=self.size), "float32", "before")
        target = weights(SMALL, Layout.on(range(self.size), dp=self.size), "float32", "after")
        plan = plan_move(source, target, cluster, bucket_bytes=256, chunk_bytes=64)
        buffers = allocate(source, self.rank) | allocate(target, self.rank)
        done = 0
        try:
            for record in moving(plan, self.rank, buffers, Channel(deadline_s=deadline_s), name="actor.weights"):
                done += record.kind == MoveKind.RECV.name
                if self.rank == victim and done == after:
                    os.kill(os.getpid(), signal_number)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        return "went through"
