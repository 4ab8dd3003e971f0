"""What two processes of this machine send each other, and sum, in bytes per second: over gloo, or over NCCL where each
has a GPU. On a CPU also how much they slow each other down, and what a layer takes that they share. Imports torch late.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import fmean, median
from typing import Any

from plait.cost.measured.sharded_layer import ShardedLayer, ShardedLayers
from plait.cost.profile import LinkRecord
from plait.errors import LayoutError, ModelError, RunError, cause_of
from plait.launch.group import Group
from plait.launch.local import LocalProcesses
from plait.launch.worker_context import WorkerContext
from plait.observe.screen import say

SIZES = {"cpu": (1 << 10, 1 << 16, 1 << 20, 1 << 23), "cuda": (1 << 10, 1 << 20, 1 << 24, 1 << 27)}
"""Bytes of messages and sums. NVLink is busy with large ones alone."""
REPEATS = 9
BETWEEN_SIZES = (1 << 12, 1 << 16, 1 << 20)
"""Bytes of sums between which both compute, as those of a model that is sharded."""
BETWEEN_REPEATS = 80
ROUNDS = 5
"""Measurements of what two processes that compute do to each other, of which the middle one counts: it differs by half
from one moment to the next."""
WORK_BYTES = 48 << 20
"""Weights that one turn of computing reads: more than caches hold."""
WORK_ROWS, WORK_WIDTH = 32, 1024
TURNS = 6
WAIT_S = 60.0
SHARDED_WAIT_S = 120.0
START_S = 90.0
"""For two processes to import torch and be connected over NCCL."""


@dataclass(frozen=True)
class Links:
    """send, all_reduce: of processes that do nothing else; between: sums in the model's dtype by processes that compute
    before each, with the wait for each other; contention: times as long as alone that computing takes where both do;
    None: not measured"""

    send: LinkRecord | None = None
    all_reduce: LinkRecord | None = None
    between: LinkRecord | None = None
    contention: float = 1.0
    sharded: ShardedLayer = field(default_factory=ShardedLayer)


def measure_links(config: Mapping[str, Any], dtype: str, tokens: Sequence[int], *, rounds: int = ROUNDS) -> Links:
    """Measure two processes of one thread each.

    Args:
        config: of the model whose layers they share, as `config.json` has it.
        tokens: of rows that pass layers that they share.
        rounds: of what they do to each other.
    """
    with LocalProcesses().start(Pair, 2, arguments=("cpu",)) as group:
        send, all_reduce = _messages(group)
        between, contention = group.submit([0, 1], "together", dtype, rounds).result(WAIT_S)[0]
        sharded = ShardedLayer()
        if tokens:
            asked = group.submit([0, 1], "sharded_layer", config, dtype, tokens, rounds)
            sharded = asked.result(SHARDED_WAIT_S)[0]
    return Links(send, all_reduce, _fitted(between), max(1.0, contention), sharded)


def measure_gpu_links() -> Links:
    """Measure two processes with a GPU each. Nothing where the machine has not two, or it cannot be done: why is said.
    While it is, this process has nothing on them."""
    import torch

    if torch.cuda.device_count() < 2:
        return Links()
    try:
        with LocalProcesses().start(Pair, 2, arguments=("cuda",), deadline_s=START_S) as group:
            return Links(*_messages(group))
    except RunError as error:
        say(f"links between GPUs are not measured: {cause_of(error)}", file=sys.stderr)
        return Links()


def _messages(group: Group) -> tuple[LinkRecord, LinkRecord]:
    """What a `Pair` sends and sums. A ring of two carries 2 (p - 1) / p = 1 times the bytes of a sum."""
    sends, sums = group.submit([0, 1], "messages").result(WAIT_S)[0]
    return _fitted(sends), _fitted(sums)


def _fitted(points: list[tuple[int, float]]) -> LinkRecord:
    """Latency of the smallest message, bandwidth of what the largest takes beyond it."""
    (_, least), (size, most) = points[0], points[-1]
    return LinkRecord(bytes_per_s=size / max(most - least, 1e-9), latency_s=least)


Measured = list[tuple[int, float]]
"""(bytes, seconds)."""


class Pair:
    """One of two ranks.

    Args:
        device: cpu or cuda, of which each has its own.
    """

    def __init__(self, context: WorkerContext, device: str) -> None:
        import torch
        import torch.distributed as dist

        from plait.models.devices import backend
        from plait.models.parallel import nccl

        torch.set_num_threads(1)
        self.rank, self.device = context.rank, device
        over, wait = backend(device, context.place.device), timedelta(seconds=WAIT_S)
        dist.init_process_group(over, store=context.store(), rank=context.rank, world_size=2, timeout=wait)
        nccl.connect(None, range(2), context.rank, pairs=True)
        self._dist: Any = dist

    def messages(self) -> tuple[Measured, Measured]:
        """Sends one way, and sums."""
        sizes = SIZES[self.device]
        sends = [(size, self.timed(self._there_and_back, size) / 2) for size in sizes]
        return sends, [(size, self.timed(self._summed, size)) for size in sizes]

    def together(self, dtype: str, rounds: int) -> tuple[Measured, float]:
        """On a CPU: sums between which both compute; times as long as alone that computing takes where both do."""
        import torch

        kind = getattr(torch, dtype)
        count = WORK_BYTES // (WORK_WIDTH * WORK_WIDTH * kind.itemsize)
        weights = [torch.ones(WORK_WIDTH, WORK_WIDTH, dtype=kind) for _ in range(count)]
        rows = torch.ones(WORK_ROWS, WORK_WIDTH, dtype=kind)
        with torch.inference_mode():
            measured = [self._round(rows, weights) for _ in range(rounds)]
        contention, *waits = (median(column) for column in zip(*measured, strict=True))
        return list(zip(BETWEEN_SIZES, waits, strict=True)), contention

    def sharded_layer(self, config: Mapping[str, Any], dtype: str, tokens: Sequence[int], rounds: int) -> ShardedLayer:
        """What a layer takes whose halves they have; nothing where it cannot be sharded in two."""
        try:
            return ShardedLayers(self.rank, config, dtype).measure(tokens, rounds)
        except (LayoutError, ModelError):
            return ShardedLayer()

    def _round(self, rows: Any, weights: list[Any]) -> list[float]:
        """Times as long as alone that computing takes where both do; seconds of a sum of each size between which both
        compute."""
        alone_s = self.computing(rows, weights) if self.rank == 0 else 1.0
        self._dist.barrier()
        both_s = self.computing(rows, weights)
        self._dist.barrier()
        return [both_s / alone_s, *(self._between(rows, weights, size) for size in BETWEEN_SIZES)]

    def computing(self, rows: Any, weights: list[Any]) -> float:
        """Seconds of a turn, as a run computes: rows [N, I] by each of the weights [I, I], of one dtype."""
        from plait.models.compute.cpu_linear import linear

        taken = []
        for _ in range(TURNS):
            started = time.perf_counter()
            for weight in weights:
                linear(rows, weight)
            taken.append(time.perf_counter() - started)
        return median(taken[1:])

    def _between(self, rows: Any, weights: list[Any], num_bytes: int) -> float:
        """What a sum takes behind some work like a layer's, which two processes never end at the same time."""
        import torch
        from torch.nn import functional

        from plait.models.compute.cpu_linear import linear

        tensor, taken = torch.zeros(num_bytes // rows.itemsize, dtype=rows.dtype), []
        for turn in range(BETWEEN_REPEATS):
            gate, up, down = (weights[(3 * turn + number) % len(weights)] for number in range(3))
            normed = functional.rms_norm(rows, rows.shape[-1:])
            linear(functional.silu(linear(normed, gate)) * linear(normed, up), down)
            started = time.perf_counter()
            self._dist.all_reduce(tensor, async_op=True).wait()
            taken.append(time.perf_counter() - started)
        return fmean(sorted(taken[1:])[: -BETWEEN_REPEATS // 50])  # without what the machine did otherwise

    def timed(self, work: Callable[[Any], None], num_bytes: int) -> float:
        """Seconds of one of several that follow each other, as `stopwatch` has it."""
        import torch

        from plait.cost.measured.stopwatch import IN_A_ROW

        tensor, calls, taken = torch.zeros(num_bytes // 4, device=self.device), IN_A_ROW[self.device], []
        for _ in range(REPEATS):
            started = self._now()
            for _ in range(calls):
                work(tensor)
            taken.append((self._now() - started) / calls)
        return median(taken[1:])

    def _now(self) -> float:
        """As the clock on the wall has it, all that was asked for being done."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _there_and_back(self, tensor: Any) -> None:
        peer = 1 - self.rank
        for sends in (self.rank == 0, self.rank == 1):
            (self._dist.send if sends else self._dist.recv)(tensor, peer)

    def _summed(self, tensor: Any) -> None:
        self._dist.all_reduce(tensor)
