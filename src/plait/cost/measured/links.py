"""What two processes of this machine send each other, and sum, over gloo, in bytes per second, how much they slow each
other down, and what a layer takes that they share. Imports torch late."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import fmean, median
from typing import Any

from plait.cost.measured.cut import CutLayer, CutLayers
from plait.cost.profile import LinkRecord
from plait.errors import LayoutError, ModelError
from plait.launch.interface import WorkerContext
from plait.launch.local import LocalProcesses

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
REPEATS = 9
BETWEEN_SIZES = (1 << 12, 1 << 16, 1 << 20)
"""Bytes of sums between which both compute, as those of a model that is cut."""
BETWEEN_REPEATS = 80
ROUNDS = 5
"""Measurements of what two processes that compute do to each other, of which the middle one counts: it differs by half
from one moment to the next."""
WORK_BYTES = 48 << 20
"""Weights that one turn of computing reads: more than caches hold."""
WORK_ROWS, WORK_WIDTH = 32, 1024
TURNS = 6
WAIT_S = 60.0
CUT_WAIT_S = 120.0


@dataclass(frozen=True)
class Links:
    """send, all_reduce: of processes that do nothing else; between: sums in the model's dtype by processes that compute
    before each, with the wait for each other; contention: times as long as alone that computing takes where both do;
    None: not measured"""

    send: LinkRecord | None = None
    all_reduce: LinkRecord | None = None
    between: LinkRecord | None = None
    contention: float = 1.0
    cut: CutLayer = field(default_factory=CutLayer)


def measure_links(config: Mapping[str, Any], dtype: str, tokens: Sequence[int], *, rounds: int = ROUNDS) -> Links:
    """Measure two processes of one thread each.

    Args:
        config: of the model whose layers they share, as `config.json` has it.
        tokens: of rows that pass layers that they share.
        rounds: of what they do to each other.
    """
    with LocalProcesses().start(Pair, 2) as group:
        measured = group.submit([0, 1], "measure", dtype, rounds).result(WAIT_S)[0]
        cut = group.submit([0, 1], "cut", config, dtype, tokens, rounds).result(CUT_WAIT_S)[0] if tokens else CutLayer()
    sends, sums, between, contention = measured
    # A ring of two carries 2 (p - 1) / p = 1 times the bytes.
    return Links(_fitted(sends), _fitted(sums), _fitted(between), max(1.0, contention), cut)


def _fitted(points: list[tuple[int, float]]) -> LinkRecord:
    """Latency of the smallest message, bandwidth of what the largest takes beyond it."""
    (_, least), (size, most) = points[0], points[-1]
    return LinkRecord(bytes_per_s=size / max(most - least, 1e-9), latency_s=least)


Measured = list[tuple[int, float]]
"""(bytes, seconds)."""


class Pair:
    """One of two ranks."""

    def __init__(self, context: WorkerContext) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.rank = context.rank
        wait = timedelta(seconds=WAIT_S)
        dist.init_process_group("gloo", store=context.store(), rank=context.rank, world_size=2, timeout=wait)
        self._dist: Any = dist

    def measure(self, dtype: str, rounds: int) -> tuple[Measured, Measured, Measured, float]:
        """Sends one way, sums, sums between which both compute; times as long as alone that computing takes where both
        do."""
        import torch

        sends = [(n, self._timed(self._there_and_back, n) / 2) for n in SIZES]
        sums = [(n, self._timed(self._summed, n)) for n in SIZES]
        kind = getattr(torch, dtype)
        count = WORK_BYTES // (WORK_WIDTH * WORK_WIDTH * kind.itemsize)
        weights = [torch.ones(WORK_WIDTH, WORK_WIDTH, dtype=kind) for _ in range(count)]
        rows = torch.ones(WORK_ROWS, WORK_WIDTH, dtype=kind)
        with torch.inference_mode():
            measured = [self._round(rows, weights) for _ in range(rounds)]
        contention, *waits = (median(column) for column in zip(*measured, strict=True))
        return sends, sums, list(zip(BETWEEN_SIZES, waits, strict=True)), contention

    def cut(self, config: Mapping[str, Any], dtype: str, tokens: Sequence[int], rounds: int) -> CutLayer:
        """What a layer takes whose halves they have; nothing where it cannot be cut in two."""
        try:
            return CutLayers(self.rank, config, dtype).measure(tokens, rounds)
        except (LayoutError, ModelError):
            return CutLayer()

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

    def _timed(self, work: Callable[[Any], None], num_bytes: int) -> float:
        import torch

        tensor = torch.zeros(num_bytes // 4)
        taken = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            work(tensor)
            taken.append(time.perf_counter() - started)
        return median(taken[1:])

    def _there_and_back(self, tensor: Any) -> None:
        peer = 1 - self.rank
        for sends in (self.rank == 0, self.rank == 1):
            (self._dist.send if sends else self._dist.recv)(tensor, peer)

    def _summed(self, tensor: Any) -> None:
        self._dist.all_reduce(tensor)
