"""Workers that do nothing: what it costs to have them, and to tell them so."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

from plait.launch.local import LocalProcesses
from plait.launch.worker_context import WorkerContext

ROUND_DEADLINE_S = 120.0


@dataclass(frozen=True)
class Cost:
    """wall_s, cpu_s: of the controlling process for one round (a command to every worker and its answer);
    resting: share of a core that it needs while nothing happens, None where that was not measured."""

    workers: int
    wall_s: float
    cpu_s: float
    resting: float | None = None


class Idle:
    """Answers at once. Imports no torch."""

    def __init__(self, context: WorkerContext) -> None:
        self.rank = context.rank

    def nothing(self) -> None:
        pass


def launched(workers: int, rounds: int, rest_s: float) -> Cost:
    """Of the process that launches and watches over workers (in a run: the one that the user started)."""
    with LocalProcesses(threads=1).start(Idle, workers) as group:
        everyone = range(workers)
        group.submit(everyone, "nothing").result(ROUND_DEADLINE_S)
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(rounds):
            group.submit(everyone, "nothing").result(ROUND_DEADLINE_S)
        wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        cpu = time.process_time()
        time.sleep(rest_s)  # heartbeats alone
        return Cost(workers, wall_s / rounds, cpu_s / rounds, (time.process_time() - cpu) / rest_s)


class Told:
    """A rank of a run without models: the leader tells the others something, and they answer."""

    def __init__(self, context: WorkerContext) -> None:
        import torch.distributed as dist

        from plait.workers.transport import Transport

        self.rank, self.size = context.rank, context.num_ranks
        wait = timedelta(seconds=ROUND_DEADLINE_S)
        dist.init_process_group("gloo", store=context.store(), rank=self.rank, world_size=self.size, timeout=wait)
        group = dist.new_group(backend="gloo", timeout=wait)
        assert isinstance(group, dist.ProcessGroup), "every rank is in the group of all"
        peers = list(range(1, self.size)) if self.rank == 0 else [0]
        self._transport = Transport(group, self.rank, peers)

    def rounds(self, count: int) -> Cost | None:
        """`count` commands to every other rank, answered by each; the cost of one on rank 0, after one for warmth."""
        from plait.workers.messages import Message

        others = range(1, self.size)
        if self.rank > 0:
            for _ in range(count + 1):
                self._transport.receive([0], "a command", ROUND_DEADLINE_S)
                self._transport.send(0, Message({"done": True}))
            return None
        wall = cpu = 0.0
        for number in range(count + 1):
            if number == 1:
                wall, cpu = time.perf_counter(), time.process_time()
            for rank in others:
                self._transport.send(rank, Message({"do": "nothing"}))
            for rank in others:
                self._transport.receive([rank], "an answer", ROUND_DEADLINE_S)
        return Cost(self.size, (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count)


def led(workers: int, rounds: int) -> Cost:
    """Of the rank that leads a run."""
    with LocalProcesses(threads=1).start(Told, workers) as group:
        answered = group.submit(range(workers), "rounds", rounds).result(10 * ROUND_DEADLINE_S)[0]
        assert answered is not None, "rank 0 measures"
        return answered


class Linked:
    """One end of a link between two ranks."""

    def __init__(self, context: WorkerContext) -> None:
        import torch.distributed as dist

        self.rank = context.rank
        dist.init_process_group("gloo", store=context.store(), rank=self.rank, world_size=context.num_ranks)

    def bytes_per_s(self, num_bytes: int, repeats: int) -> float:
        """In each direction, both at a time; the best of the repeats, as a ceiling asks for."""
        import torch
        import torch.distributed as dist

        out, back = torch.zeros(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
        peer = 1 - self.rank
        best = float("inf")
        for _ in range(repeats + 1):
            dist.barrier()
            begun = time.perf_counter()
            works = [dist.irecv(back, peer), dist.isend(out, peer)]
            for work in works:
                assert work is not None, "a rank of the group"
                work.wait()
            best = min(best, time.perf_counter() - begun)
        return num_bytes / best


def link_bytes_per_s(num_bytes: int = 64 << 20, repeats: int = 5) -> float:
    with LocalProcesses(threads=1).start(Linked, 2) as group:
        return min(group.submit(range(2), "bytes_per_s", num_bytes, repeats).result(ROUND_DEADLINE_S))
