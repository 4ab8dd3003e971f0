"""A process that lives as long as the one that started it, which alone says when. Imports the standard library and
`stop_signals` only."""

from __future__ import annotations

import faulthandler
import fcntl
import io
import os
import select
import signal
import sys
import threading
import time

from plait.stop_signals import heeded, let_be

_LONGEST_TURN_S = 0.5
"""What one look counts of silence at most: when this process was held up as well, it was not its owner alone."""


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


def end_unless_heard(beats_fd: int, silent_after_s: int) -> None:
    """Have this process group killed when its owner says nothing for so long while this process runs: an owner that is
    stopped keeps the pipe of `die_with` open, and ends nothing. Seconds in which this process is stopped too, as when a
    scheduler suspends a job, do not count.

    Args:
        beats_fd: the end of a pipe from which a byte is read now and then.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(beats_fd, select.POLLIN)
        silence_s, turned = 0.0, time.monotonic()
        while silence_s < silent_after_s:
            heard = bool(poll.poll(_LONGEST_TURN_S * 1e3))
            if heard and not os.read(beats_fd, 1 << 12):
                return  # the owner has ended: see `die_with`
            elapsed, turned = min(time.monotonic() - turned, _LONGEST_TURN_S), time.monotonic()
            silence_s = 0.0 if heard else silence_s + elapsed
        print(
            f"nothing came for {silence_s:.0f} s from the process that started this rank: it is frozen, and the run "
            "has gone on without its node, or has ended; this rank ends",
            file=sys.stderr,
            flush=True,
        )
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="plait-owner-watch", daemon=True).start()


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
