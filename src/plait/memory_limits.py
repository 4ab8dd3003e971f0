"""How much memory this process may have, and whether the kernel has ended processes for want of it.

On Linux a process is in a memory control group, within others, each of which may have a limit (version 1 and 2 of these
groups); in each the kernel counts the processes that it has ended. Imports the standard library, and psutil late.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
GROUPS = Path("/proc/self/cgroup")
_GIB = 2**30


@dataclass(frozen=True)
class Limit:
    """Bytes, and whose they are: the control group's of that folder; None: the machine's."""

    bytes: int
    group: Path | None

    def __str__(self) -> str:
        whose = "the machine" if self.group is None else "its control group"
        return f"{self.bytes / _GIB:.2f} GiB is all that {whose} has"


def machine_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def limit() -> Limit:
    """The least of what the machine has and what the control groups of this process may have."""
    limits = [Limit(machine_bytes(), None)]
    for folder in group_folders():
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # `max`: it has none
                limits.append(Limit(int((folder / name).read_text()), folder))
    return min(limits, key=lambda bound: bound.bytes)


def used_bytes() -> int:
    """What is used of `limit`, files that can be read again not counted; 0 where that is not known."""
    import psutil  # no part of the standard library, and this is rarely asked

    group = limit().group
    with contextlib.suppress(OSError, ValueError):
        if group is None:
            memory = psutil.virtual_memory()
            return int(memory.total - memory.available)
        used = next(path for name in ("memory.current", "memory.usage_in_bytes") if (path := group / name).exists())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        files = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        return max(0, int(used.read_text()) - files)
    return 0


class KernelKills:
    """Counts the processes of this process's control group that the kernel ends for want of memory, from now on; of
    the whole machine, where only that is counted."""

    def __init__(self) -> None:
        self._before = _kills()

    def words(self) -> str:
        """What is to be said of a process of this group that has been killed by SIGKILL; empty: memory was not why."""
        before, now = self._before, _kills()
        if before is None or now is None:
            return " (out of memory?)"
        if now <= before:
            return ""
        count = now - before
        return f", out of memory: the kernel has ended {count} process{'es' * (count > 1)} for it; {limit()}"


def _kills() -> int | None:
    files = [folder / name for folder in group_folders()[:1] for name in ("memory.events", "memory.oom_control")]
    for file in (*files, Path("/proc/vmstat")):
        with contextlib.suppress(OSError):
            if match := re.search(r"^oom_kill (\d+)", file.read_text(), re.MULTILINE):
                return int(match[1])
    return None


@cache
def group_folders() -> tuple[Path, ...]:
    """Those of this process's memory control group and of the groups around it, from the inside out."""
    try:
        lines = [line.split(":", 2) for line in GROUPS.read_text().splitlines()]
    except OSError:
        return ()
    first = next((path for _, names, path in lines if "memory" in names.split(",")), None)
    second = next((path for number, names, path in lines if number == "0" and not names), None)
    mounts = [(MOUNT / "memory", first)] if first is not None else [(MOUNT, second), (MOUNT / "unified", second)]
    for mount, path in mounts:
        if path is None or not mount.is_dir():
            continue
        group_folder = mount / path.lstrip("/")
        # In a container the path may be that of its machine, and the mount the group itself.
        inside = group_folder if group_folder.is_dir() and ".." not in group_folder.parts else mount
        return (inside, *(folder for folder in inside.parents if folder.is_relative_to(mount)))
    return ()
