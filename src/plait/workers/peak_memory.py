"""The most memory that the process of a rank has held since a run began in it, and its GPU."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

import torch

_RESETS_PEAK = "5"
"""See proc_pid_clear_refs(5)."""


def forget_peak() -> None:
    """Count from what is held now: this process may have had a run before."""
    with contextlib.suppress(OSError):  # a system that keeps no such file: the peak is that of the process
        Path("/proc/self/clear_refs").write_text(_RESETS_PEAK)
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> tuple[int, int | None]:
    """Resident bytes at the peak, and bytes of tensors on the GPU at theirs; None: this process uses none."""
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
    return _resident_bytes(), device


def _resident_bytes() -> int:
    """`ru_maxrss` of a process that was forked is its parent's where that had more; the kernel's own count is not."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
