"""A computation is captured once by CUDA, and replayed by one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor


class Graph(Protocol):
    """What was captured."""

    def replay(self) -> None:
        """Compute it again, from what its inputs hold now."""
        ...

    def pool(self) -> Any:
        """Names the memory that it computes in."""
        ...


First = Callable[[Callable[[], AbstractContextManager[None]]], object]
"""What is done before a computation is captured for the first time, where it will be captured. It is given what makes a
context within which everything that waits for the device raises."""


class Capture(Protocol):
    """Captures a computation: the graph, and the tensor that each replay writes its result to."""

    def __call__(
        self, compute: Callable[[], Tensor], beside: Graph | None, *, first: First | None
    ) -> tuple[Graph, Tensor]:
        """
        Args:
            compute: gives the result, of any shape.
            beside: a graph that is never replayed at the same time: both may compute in one memory, but for results.
            first: done before; None: it has been captured before, at other addresses.
        """
        ...


def by_cuda(compute: Callable[[], Tensor], beside: Graph | None, *, first: First | None) -> tuple[Graph, Tensor]:
    """Capture on the current CUDA device; with the graph the logits [T, V] that it writes to. What waits for the device
    is to be found by `first`: it would break a capture, and what torch allocates for a broken one is not always given
    back.

    `torch.cuda.graph` would give back all memory that the process keeps for later before each capture, the pinned
    memory of uploads, too. Here that of the device is given back before the first one.

    Raises:
        RuntimeError: the computation asks the device for a number, or does something else that no graph can.
    """
    stream, aside, graph = torch.cuda.current_stream(), capture_stream(), torch.cuda.CUDAGraph()
    if beside is None:
        torch.cuda.empty_cache()
    aside.wait_stream(stream)
    try:
        with torch.cuda.stream(aside):
            if first is not None:
                first(_no_waits)
            # Other threads may go on meanwhile: one that looks after NCCL asks the device whenever it likes.
            graph.capture_begin(pool=beside and beside.pool(), capture_error_mode="thread_local")
            try:
                out = compute()
            finally:
                graph.capture_end()
    finally:
        stream.wait_stream(aside)  # also of what has failed: it reads memory that the next step takes
    return graph, out


@contextmanager
def _no_waits() -> Iterator[None]:
    """Within it what waits for the device raises."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@cache
def capture_stream() -> torch.cuda.Stream:
    """Where all captures of this process are made: libraries of products keep a workspace for each stream, and graphs
    that compute in one memory have to be captured on one."""
    return torch.cuda.Stream()
