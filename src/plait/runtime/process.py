"""How this process computes, and how much memory it holds."""

from __future__ import annotations

import os

import torch

from plait.cost.machine import threads_alone
from plait.workers.peak_memory import forget_peak


def set_up(threads: int) -> None:
    """Fix the number of compute threads: the same number gives the same bits. What the process holds at most counts
    from now on.

    Args:
        threads: see `threads_alone`.
    """
    # Transformers reads a checkpoint with threads, whose allocators keep what they free where `give_back_freed` cannot
    # reach it: 80 MB of SmolLM2-135M in bfloat16.
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
    torch.set_num_threads(threads_alone(threads))
    forget_peak()


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
