"""What echoes of a node tell: how fast it is reached, and how far its clock is ahead."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from plait.launch.nodes.messages import Answer, Clock, Echo

ECHOED_BYTES, ECHOES = 4 << 20, 3
"""Size of a message that says how fast the network is, and how often it is sent."""

AskForEcho = Callable[[Echo], Answer | None]
"""What the node answers; None if it does not in time."""


class Reach(NamedTuple):
    """How fast a node is reached: bytes per second, and seconds of a message without any."""

    bytes_per_s: float
    latency_s: float


def reach_of(ask: AskForEcho) -> Reach | None:
    """By the shortest of a few messages; None: it does not answer."""
    taken: dict[int, float] = {}
    for size in (0, ECHOED_BYTES) * ECHOES:
        if (echoed := _echoed(ask, size)) is None:
            return None
        taken[size] = min(taken.get(size, echoed[0]), echoed[0])
    return Reach(ECHOED_BYTES / max(taken[ECHOED_BYTES] - taken[0], 1e-9), taken[0] / 2)


def clock_ahead_s(ask: AskForEcho) -> float:
    """How far the node's clock is ahead of this process's, by the shortest of a few messages. 0 of a node that does not
    answer."""
    echoes: list[tuple[float, float]] = []
    while len(echoes) < ECHOES and (echoed := _echoed(ask, 0)) is not None:
        echoes.append(echoed)
    return min(echoes, default=(0.0, 0.0))[1]


def _echoed(ask: AskForEcho, size: int) -> tuple[float, float] | None:
    """(seconds that a message of so many bytes takes there and back, how far the node's clock is ahead if both ways
    take equally long); None: no answer."""
    began = time.perf_counter()
    answer = ask(Echo(bytes(size)))
    ended = time.perf_counter()
    return (ended - began, answer.now_s - (began + ended) / 2) if isinstance(answer, Clock) else None
