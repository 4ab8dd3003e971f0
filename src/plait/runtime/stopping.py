"""How a run is broken off: by a signal, after the step under way; or by an error, with what is whole saved."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from plait.errors import RunError
from plait.observe.progress import Progress
from plait.runtime.session import Session


@contextlib.contextmanager
def saying_what_is_good(session: Session) -> Iterator[None]:
    """However a run breaks off: save the last whole step if that is still to do, and say where one can go on."""
    try:
        yield
    except KeyboardInterrupt:
        session.progress.message(f"left at once; {session.good}")
        raise
    except RunError as error:
        raise RunError("; ".join(filter(None, (str(error), session.rescue())))) from error
    except Exception:  # a loss of the user's that raises, torch out of memory, …: it goes on up as it is
        session.progress.message(session.rescue())
        raise


class Stop:
    """Set by SIGINT or SIGTERM; a second signal interrupts at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked = False
        self.doing = "leaving"
        """What will still be done after a signal, in words."""
        self._say = say

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        with contextlib.suppress(RuntimeError):  # the signal came in the middle of a write to the same stream
            self._say(f"{self.doing}; once more to leave at once")


@contextlib.contextmanager
def stop_signals(progress: Progress) -> Iterator[Stop]:
    """Catch SIGINT and SIGTERM while inside (in a main thread), and give the old handlers back."""
    stop = Stop(progress.message)
    try:
        old = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: whoever runs us decides when to stop
        yield stop
        return
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
