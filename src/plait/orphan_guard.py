"""A process that lives as long as the one that started it, which alone says when. Imports the standard library and
`stop_signals` only."""

from __future__ import annotations

import faulthandler
import fcntl
import io
import os
import signal
import sys
import threading

from plait.stop_signals import heeded, let_be


def begin_as_child(guard_fd: int, crash_fd: int) -> None:
    """What such a process does first, in its main thread: `leave_stopping_to_parent` and `die_with` that process. What
    it prints is not lost if it is killed, and where it is stands in a file when it crashes or gets a SIGUSR1.

    Args:
        guard_fd: as of `die_with`.
        crash_fd: of that file.
    """
    leave_stopping_to_parent()
    die_with(guard_fd)
    faulthandler.enable(crash_fd, all_threads=False)
    faulthandler.register(signal.SIGUSR1, crash_fd, all_threads=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


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
    """Have signals that ask to stop do nothing in this process: where all processes of a job get one (Slurm, systemd),
    the command is meant, which ends its step first. What this process starts or forks has the system's handling. To be
    called in the main thread.
    """
    numbers = heeded()
    forking = threading.local()

    def hold() -> None:
        # A signal that comes to a child as soon as there is one waits until the handling is the child's own.
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    def give_back() -> None:
        for number in numbers:
            if signal.getsignal(number) is let_be:
                signal.signal(number, signal.SIG_DFL)
        release()

    for number in numbers:
        signal.signal(number, let_be)
        signal.siginterrupt(number, False)
    os.register_at_fork(before=hold, after_in_child=give_back, after_in_parent=release)
