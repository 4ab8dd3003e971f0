"""What two processes of this machine send each other, and sum, over gloo, in bytes per second. Imports torch late."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

from plait.cost.profile import LinkRecord
from plait.launch.interface import WorkerContext
from plait.launch.local import LocalProcesses

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
REPEATS = 9
WAIT_S = 60.0


def measure_links() -> tuple[LinkRecord, LinkRecord]:
    """Measure sends from one process to another, and sums over both: a latency and a bandwidth each."""
    with LocalProcesses().start(Pair, 2) as group:
        sends, sums = group.submit([0, 1], "measure").result(WAIT_S)[0]
    # A ring of two carries 2 (p - 1) / p = 1 times the bytes.
    return _fitted(sends), _fitted(sums)


def _fitted(points: list[tuple[int, float]]) -> LinkRecord:
    """Latency of the smallest message, bandwidth of what the largest takes beyond it."""
    (_, least), (size, most) = points[0], points[-1]
    return LinkRecord(bytes_per_s=size / max(most - least, 1e-9), latency_s=least)


class Pair:
    """One of two ranks."""

    def __init__(self, context: WorkerContext) -> None:
        import torch.distributed as dist

        self.rank = context.rank
        wait = timedelta(seconds=WAIT_S)
        dist.init_process_group("gloo", store=context.store(), rank=context.rank, world_size=2, timeout=wait)
        self._dist: Any = dist

    def measure(self) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """(bytes, seconds) of sends one way, and of sums."""
        return [(n, self._timed(self._there_and_back, n) / 2) for n in SIZES], [
            (n, self._timed(self._summed, n)) for n in SIZES
        ]

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
