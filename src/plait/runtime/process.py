"""How this process computes: number of threads, and what the allocator does with freed memory."""

from __future__ import annotations

import ctypes
import os
import sys

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def set_up(threads: int) -> None:
    """Fix the number of compute threads (the same number gives the same bits) and keep freed memory for reuse.

    Args:
        threads: 0 takes what OMP_NUM_THREADS says, else one per core that this process may use.
    """
    asked = threads or int(os.environ.get("OMP_NUM_THREADS", "0")) or len(os.sched_getaffinity(0))
    torch.set_num_threads(asked)
    keep_freed_memory()


def keep_freed_memory() -> None:
    """glibc gives large freed blocks back to the kernel, which then clears every page again for the next tensor of that
    size: a twelfth of a small training step. Blocks from 64 MiB on are still given back. Elsewhere than on glibc
    nothing is done."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 26)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
