"""Threads that share one call of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event


class KernelThreads:
    """The threads beside the one that calls; they stay for the next call."""

    def __init__(self) -> None:
        self._others: ThreadPoolExecutor | None = None
        self._count = 0

    def run(self, part: Callable[[int], None], parts: int) -> None:
        """Have so many threads run `part(number)` at the same time, the calling one as number 0, and wait for all.

        Raises:
            RuntimeError: there cannot be so many threads.
        """
        if parts == 1:
            part(0)
            return
        if self._others is None or self._count < parts - 1:
            self._others, self._count = _begun(parts - 1), parts - 1
        others = [self._others.submit(part, number) for number in range(1, parts)]
        part(0)
        for other in others:
            other.result()


def _begun(count: int) -> ThreadPoolExecutor:
    """`count` threads, all of them started: in a step each waits for the others, so none may be missing. Raises
    RuntimeError if one cannot be started."""
    threads, are_there = ThreadPoolExecutor(count, thread_name_prefix="compiled-forward"), Event()
    try:
        for _ in range(count):
            threads.submit(are_there.wait)
    finally:
        are_there.set()
    return threads
