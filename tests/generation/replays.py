"""A graph is here its computation, done again: it reads and writes the same tensors, as a graph of CUDA does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor

from plait.generation.cuda_graphs import First, Graph


class Again:
    """A graph that computes again, at the addresses of its first time."""

    made: list[Again] = []  # noqa: RUF012

    def __init__(self, compute: Callable[[], Tensor], beside: Graph | None, first: First | None) -> None:
        self.compute = compute
        self.beside = beside
        self.again = first is None
        if first is not None:
            first(nullcontext)
        self.out = compute().clone()
        self.replays = 0
        Again.made.append(self)

    def replay(self) -> None:
        self.replays += 1
        self.out.copy_(self.compute())

    def pool(self) -> None:
        """Its memory has no name."""


def capture(compute: Callable[[], Tensor], beside: Graph | None, *, first: First | None) -> tuple[Again, Tensor]:
    graph = Again(compute, beside, first)
    return graph, graph.out
