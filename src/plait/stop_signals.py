"""The signals by which a process is asked to stop, and who is told of them. Imports the standard library only."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, `kill`, and a terminal that is closed."""

Handler = Callable[[int, FrameType | None], None]
"""Is given the signal, and the frame that it came in."""


def heeded(numbers: Sequence[signal.Signals] = STOP_SIGNALS) -> list[signal.Signals]:
    """Those of some signals that this process is to heed: under `nohup` it ignores SIGHUP, and goes on to."""
    ignored = (signal.SIG_IGN, None)
    return [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) not in ignored]


def let_be(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing. What this process starts has the system's handling, as it has not under SIG_IGN."""


def interrupt(number: int, frame: FrameType | None) -> None:
    """The handler of a command: interrupts it. From then on SIGHUP does nothing (see `signals_to`), so that what was
    begun is taken back to the end."""
    if signal.getsignal(signal.SIGHUP) is interrupt:
        signal.signal(signal.SIGHUP, let_be)
    _interrupts.append(number)
    raise KeyboardInterrupt


_interrupts: list[int] = []
"""Signals for which `interrupt` has raised."""


@contextlib.contextmanager
def interrupts_kept() -> Iterator[None]:
    """While inside, Ctrl-C goes to `interrupt` where it would go to Python's own handler, so that `raise_lost` knows of
    it."""
    is_pythons = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    takes_place = is_pythons and threading.current_thread() is threading.main_thread()
    if takes_place:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        _interrupts.clear()
        if takes_place and signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def raise_lost() -> None:
    """Raises KeyboardInterrupt where `interrupt` has, and nothing ended: Python drops what is raised in a destructor or
    in the callback of a weak reference, of which loading a model has many."""
    if _interrupts:
        raise KeyboardInterrupt


@contextlib.contextmanager
def signals_to(handler: Handler, numbers: Sequence[signal.Signals] = STOP_SIGNALS) -> Iterator[None]:
    """Hand these signals, as far as they are heeded, to `handler` while inside, and give the old handlers back. SIGHUP
    is never a second one, nor for `interrupt` behind it: a terminal that closes sends it as a shell does, and may close
    at any time. In a thread that is not the main one nothing changes: whoever runs us there decides when to stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = False

    def hand_on(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came and number == signal.SIGHUP:
            return
        came = True
        handler(number, frame)

    old = {number: signal.signal(number, hand_on) for number in heeded(numbers)}
    try:
        yield
    finally:
        for number, before in old.items():
            is_second = came and number == signal.SIGHUP and before is interrupt
            signal.signal(number, let_be if is_second else before)
