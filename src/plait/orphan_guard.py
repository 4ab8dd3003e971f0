"""A process that dies with the one that started it. Imports the standard library only."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading


def die_with(guard_fd: int) -> None:
    """Have this process group killed when the other end of a pipe closes, however its owner ended.

    On Linux the kernel sends the SIGKILL, so that a stopped process dies too, and one that is stuck in C code with the
    interpreter lock (a thread would wait for the lock, and PR_SET_PDEATHSIG would fire when the spawning thread ends).
    The thread serves other systems.

    Args:
        guard_fd: the end that is read; nothing is ever written.
    """
    if sys.platform == "linux":
        set_signal = 10  # F_SETSIG, which the fcntl module does not name
        fcntl.fcntl(guard_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(guard_fd, set_signal, signal.SIGKILL)
        flags = fcntl.fcntl(guard_fd, fcntl.F_GETFL)
        fcntl.fcntl(guard_fd, fcntl.F_SETFL, flags | os.O_ASYNC)

    def watch() -> None:
        os.read(guard_fd, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="plait-orphan-guard", daemon=True).start()
