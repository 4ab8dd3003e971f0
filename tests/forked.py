"""Work in a process of its own: a fork, which has imported already, and runs one thread."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable


def forked(work: Callable[[], object]) -> int:
    """Begin `work` there, in a group of processes of its own; returns the process's id. An exception is written to
    stderr, and the exit code is 1."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            work()
            code = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return pid


def exit_code_of(pid: int, limit_s: float = 120.0) -> int:
    """Below 0 it is the signal that ended it; the test fails if the process outlives the limit."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the process did not end within {limit_s:.0f} s")
