"""A message between two ranks on its way, and the count of what came."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

WaitingFor = Callable[[str], AbstractContextManager[None]]
"""Told what is waited for, for as long as it is (`launch`'s WorkerContext.waiting_for)."""


@dataclass(eq=False)
class Transfer:
    """A message on its way. Its tensor must stay as it is until `wait` returns."""

    tensor: Tensor
    _wait: Callable[[], None]

    def wait(self) -> Tensor:
        """Until the tensor, of any shape and dtype, is free (sent) or filled (received), and return it.

        Raises:
            RunError: nothing came through until the deadline, or the peer is gone.
        """
        self._wait()
        return self.tensor


@dataclass(eq=False)
class Traffic:
    """What came to this rank, so far: the least that any algorithm for the same calls receives. A sum of n bytes over p
    ranks counts as its two halves, reduce-scatter and all-gather: 2 n (p - 1) / p; one that a single rank gets counts
    there, n (p - 1)."""

    received_bytes: int = 0
