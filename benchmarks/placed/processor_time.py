"""Processor seconds of a run's workers, and of all else that was started for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_WORKER = b"plait.launch.worker"


class Used(NamedTuple):
    """Processor seconds, of user and system."""

    workers_s: float
    beside_s: float
    """The process that waits for the workers, agents of nodes, daemons of a cluster."""


def used() -> Used:
    """By all processes that descend from this one and still run, and by those that they have waited for."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(folder.name)
        parents[pid], seconds[pid] = int(fields[1]), sum(map(int, fields[11:15])) / _TICKS_PER_S
    totals = [0.0, 0.0]
    for pid in parents:
        if _descends(pid, parents):
            totals[not _is_worker(pid)] += seconds[pid]
    return Used(*totals)


def _descends(pid: int, parents: dict[int, int]) -> bool:
    own = os.getpid()
    while pid in parents:
        pid = parents[pid]
        if pid == own:
            return True
    return False


def _is_worker(pid: int) -> bool:
    try:
        return _WORKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
