"""Files of tests are not forced to disk: nobody cuts the power, and a tiny run forces forty files, 3 ms each.

That a file is forced, when, and what follows where that fails, is told by the call, which tests see as ever. In `make
test-all` the disk is waited for.
"""

from __future__ import annotations

import os


def install() -> None:
    """In this process, and in its forks, unless `COLD` is in its environment."""
    if not os.environ.get("COLD"):
        os.fsync = written


def written(fd: int) -> None:
    """As `os.fsync`, which refuses what is no open file."""
    os.fstat(fd)
