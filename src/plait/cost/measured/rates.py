"""The rates of a machine here and now: of a copy, and of a large matrix product. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from plait.cost.limit import MachineRates
from plait.models.compute import cpu_linear

COPIED_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20}
"""Several times what a cache holds: 50 MB of an H100, 128 of a B200."""
MATRIX_SIZE = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of a product that runs at the highest rate."""
REPEATS = 5
ENOUGH_S = 0.3
"""Seconds of one kind of work, after which it is not repeated: what takes long here is not the fastest."""


def measure_rates(dtype: str, device: str = "cpu") -> MachineRates:
    """The machine's rates with the threads of this process; about a second, and 256 MiB, 1 GiB of a GPU."""
    return MachineRates(_copy_rate(device), _matrix_rate(dtype, device))


def _copy_rate(device: str) -> float:
    source = torch.ones(COPIED_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES[device] / _fastest(lambda: target.copy_(source), device)


def _matrix_rate(dtype: str, device: str) -> float:
    size = MATRIX_SIZE[device]
    # Of equal numbers a GPU takes less power, and is faster.
    left, right = (torch.randn(size, size, dtype=getattr(torch, dtype), device=device) for _ in range(2))
    with torch.inference_mode():
        seconds = [_fastest(work, device) for work in (lambda: left @ right, lambda: cpu_linear.linear(left, right))]
    return 2 * size**3 / min(seconds)


def _fastest(work: Callable[[], object], device: str) -> float:
    times: list[float] = []
    while len(times) <= REPEATS and sum(times[1:]) < ENOUGH_S:  # the first warms up
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])
