"""How long work takes on a device, however busy the machine is and however its speed drifts. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from statistics import median

import torch

MOST_REPEATS = 12
BRIEF_S = 0.1
"""Work is repeated at once until so much has passed; what is longer is repeated by rounds alone."""
ROUNDS = 3
LONG_S = 4.0
"""Larger sizes are not measured once one took so long."""
LEAST_SIZES = 2

Size = tuple[int, ...]
Seconds = tuple[float, ...]
Work = Callable[[], Seconds]
"""Measures some seconds once; the same ones each time that it is called."""


def in_rounds(
    families: Mapping[str, Mapping[Size, Work]], within_s: float, *, rounds: int = ROUNDS, compiles: bool = False
) -> dict[str, dict[Size, Seconds]]:
    """Medians of what works measure by turns: each round has all of them, so that where the machine is fast for half a
    minute it is so for each.

    Args:
        families: sizes from the least to the largest. Two of each are measured at least, larger ones unless one took
            `LONG_S`, the time is up, or a GPU has no room for one.
        within_s: a second round, and further ones, do not begin later.
        rounds: 1 or more, beside a first one, which warms up: what it calls may be compiled there.
        compiles: it is, for long: how long a first call takes says nothing of its size, so the first round has all of
            them, and the time begins behind it.
    """
    until = time.monotonic() + within_s
    measured = {name: _first_round(works, inf if compiles else until) for name, works in families.items()}
    if compiles:
        until = time.monotonic() + within_s
    for number in range(rounds):
        if number > 0 and time.monotonic() > until:
            break
        for name, sizes in measured.items():
            for size, taken in sizes.items():
                taken.append(families[name][size]())
    return {name: {size: _medians(taken) for size, taken in sizes.items()} for name, sizes in measured.items()}


def _first_round(works: Mapping[Size, Work], until: float) -> dict[Size, list[Seconds]]:
    """Each size that is measured, once; without an end all that there is room for."""
    taken: dict[Size, list[Seconds]] = {}
    for size, work in works.items():
        started = time.monotonic()
        try:
            taken[size] = [work()]
        except torch.OutOfMemoryError:
            if len(taken) < LEAST_SIZES:
                raise
            break
        ended = time.monotonic()
        is_late = ended > until or (ended - started > LONG_S and until < inf)
        if len(taken) >= LEAST_SIZES and is_late:
            break
    return taken


def _medians(taken: Sequence[Seconds]) -> Seconds:
    return tuple(median(column) for column in zip(*taken[1:], strict=True))


def seconds_of(work: Callable[[], object], device: str) -> float:
    """Typical seconds of some work.

    Args:
        device: kind of the device that it keeps busy.
    """
    taken: list[float] = []
    for _ in repeats(taken):
        started = now(device)
        work()
        taken.append(now(device) - started)
    return typical(taken)


IN_A_ROW = {"cpu": 1, "cuda": 16}
"""Calls of brief work between two waits."""


def seconds_in_a_row(work: Callable[[], object], device: str) -> float:
    """`seconds_of` one of several calls that follow each other: to wait for a GPU takes as long as brief work does, and
    in a run there is more to do behind it."""
    calls = IN_A_ROW[device]

    def all_calls() -> None:
        for _ in range(calls):
            work()

    return seconds_of(all_calls, device) / calls


def repeats(taken: Sequence[float]) -> Iterator[int]:
    """Once, and again as long as it is brief."""
    for number in range(MOST_REPEATS):
        if number > 0 and sum(taken) > BRIEF_S:
            return
        yield number


def typical(taken: Sequence[float]) -> float:
    """The shortest: what else the machine does only adds to it. The first of several warms up."""
    return min(taken[1:] or taken)


def typical_behind(taken: Sequence[float]) -> float:
    """The median of the calls, without the first of several (a warm-up). Each call waits only for the one before: if
    one was submitted late, the device has caught up, and the next call seems shorter by as much."""
    return median(taken[1:] or taken)


def now(device: str) -> float:
    """Seconds (`clock`), all that was asked for being done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return clock(device)


def clock(device: str) -> float:
    """Seconds, whatever is still being done. Of one thread of a CPU those that it had it for, so that what else the
    machine does adds little."""
    return time.process_time() if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter()
