"""Whether another process still runs, and waits that end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

ENDED = ("Z", "X")
"""States of a process that runs no more: a zombie, and one that the kernel takes away."""


def state_of(pid: int) -> str:
    """The letter by which the kernel names the state of a process; "X" where it is not, or no longer, there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the second: it ended after its file was opened
        return "X"


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie that its parent has not yet reaped does not."""
    return state_of(pid) not in ENDED


def gone(pid: int, limit_s: float = 20.0) -> bool:
    """Whether the process has ended within `limit_s` seconds."""
    return until(lambda: not alive(pid), limit_s)


def until(condition: Callable[[], object], limit_s: float = 20.0) -> bool:
    """Wait for `condition`, for `limit_s` seconds at most; returns whether it came to hold."""
    end = time.monotonic() + limit_s
    while not (holds := bool(condition())) and time.monotonic() < end:
        time.sleep(0.01)
    return holds
