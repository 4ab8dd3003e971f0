"""A message between two ranks on its way, the count of what came, and why nothing did."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from plait.errors import cause_of

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


def why_not_through(error: RuntimeError | None, timeout_s: float) -> str:
    """Why nothing came through until a deadline, in words.

    Args:
        error: of torch.distributed; None: the wait was aborted.
    """
    if error is None:
        return "it was aborted"
    cause = cause_of(error)
    return f"nothing in {timeout_s:g} s ({cause})" if re.search("timed out|timeout", cause, re.IGNORECASE) else cause
