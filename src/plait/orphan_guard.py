"""A process that lives as long as the one that started it, which alone says when. Imports the standard library only."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
from collections.abc import Callable


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


def leave_stopping_to_parent() -> None:
    """Have SIGINT and SIGTERM do nothing in this process: where all processes of a job get one (Slurm, systemd), the
    command is meant, which ends its step first. What this process starts or forks has the system's handling.
    """

    def handle(handler: Callable[..., None] | signal.Handlers) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, handler)

    def let_be(*_: object) -> None:
        pass

    def give_back() -> None:
        handle(signal.SIG_DFL)

    handle(let_be)
    # Before the fork, too: a signal that comes to a child as soon as there is one must not meet our handler.
    os.register_at_fork(before=give_back, after_in_child=give_back, after_in_parent=lambda: handle(let_be))
