"""Runs in worker processes: how much memory it takes a rank to read its part of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plait.layout.mesh import Layout
from plait.models.parallel.part_loading import PartLoader
from plait.models.parallel.team import make_teams


def peak_of_part(worker: Any, small: str, folder: str, **sizes: int) -> dict[str, int]:
    """Bytes of the part, and by how much the process grew at most while it was read.

    Args:
        small: folder of a tiny model that is read before, so that all libraries are there.
    """
    layout = Layout.on(range(2), **sizes)
    team = make_teams([layout], worker.rank, timeout_s=60.0)[layout]
    assert team is not None
    loader = PartLoader(dtype="float32", device="cpu", seed=0, head_std=None)
    loader.part(small, team)
    Path("/proc/self/clear_refs").write_text("5")  # ru_maxrss would be that of the parent process, if it had more
    before = _bytes_of("VmRSS")
    part = loader.part(folder, team)
    return {"part": part.weights.nbytes, "growth": _bytes_of("VmHWM") - before}


def _bytes_of(what: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) << 10
