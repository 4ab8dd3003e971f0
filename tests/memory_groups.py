"""Groups of processes whose memory is bounded (cgroups of either version), where this machine lets one be made."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOTS = {
    Path("/sys/fs/cgroup/memory"): ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    Path("/sys/fs/cgroup"): ("memory.max", "memory.swap.max"),
}
"""Where groups are made, and the files of their limits: of memory, and with swap (version 1) or of swap (2)."""

_ENTER = """
import os, sys
open(sys.argv[1], "w").write(str(os.getpid()))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def inside(group: Path, *arguments: str) -> list[str]:
    """A command that runs python with these arguments, in a group."""
    return [sys.executable, "-c", _ENTER, str(group / "cgroup.procs"), *arguments]


@contextlib.contextmanager
def bounded(limit_bytes: int) -> Iterator[Path]:
    """The folder of a new group; skips the test where none can be made."""
    for root, (limit, swap) in ROOTS.items():
        folder = root / f"plait-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            try:
                (folder / limit).write_text(str(limit_bytes))
                with contextlib.suppress(OSError):  # swap is not counted here
                    (folder / swap).write_text(str(limit_bytes if "memsw" in swap else 0))
                yield folder
            finally:
                for _ in range(50):  # the kernel lets go of the last process a moment later
                    with contextlib.suppress(OSError):
                        folder.rmdir()
                        break
                    time.sleep(0.1)
            return
    pytest.skip("no group of bounded memory can be made here")
