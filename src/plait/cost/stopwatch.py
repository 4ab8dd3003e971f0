"""How long work takes on a device, however busy the machine is. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch


def seconds_of(work: Callable[[], object], device: str) -> float:
    """Typical seconds of some work, which is repeated.

    Args:
        device: kind of the device that it keeps busy.
    """
    taken: list[float] = []
    for _ in repeats(taken):
        started = now(device)
        work()
        taken.append(now(device) - started)
    return typical(taken)


def repeats(taken: Sequence[float]) -> Iterator[int]:
    """Three times at least, the first of which warms up; further ones as long as they are short."""
    for number in range(12):
        if number >= 3 and sum(taken) > 0.3:
            return
        yield number


def typical(taken: Sequence[float]) -> float:
    """The shortest: what else the machine does only adds to it. The first warms up."""
    return min(taken[1:])


def now(device: str) -> float:
    """Seconds, all that was asked for being done. Of one thread of a CPU those that it had it for, so that what else
    the machine does adds little."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.process_time() if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter()
