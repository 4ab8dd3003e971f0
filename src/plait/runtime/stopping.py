"""How a run is broken off: by a signal, after the step under way; or by an error, with what is whole saved."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from plait.errors import RunError
from plait.stop_signals import signals_to

LEADERS_SIGNAL = signal.SIGUSR2
"""By which a rank that leads is: no scheduler sends it unless told to, as SIGTERM is sent to all processes of a job."""
_SAID_S = 10.0
"""That a last word may take."""


@contextlib.contextmanager
def saying_how_to_resume(
    tell: Callable[[str], None], how_to_resume: Callable[[], str], rescue: Callable[[], str]
) -> Iterator[None]:
    """However a run breaks off, say how it can be resumed.

    Args:
        tell: shows a text to the user.
        how_to_resume: says which step is saved, and how to go on from it.
        rescue: the same, after it has saved the last whole step if that was not saved yet.

    Raises:
        RunError: one that passes through, with the way on behind its message.
        KeyboardInterrupt: one that passes through, with what was said.
    """
    try:
        yield
    except KeyboardInterrupt:
        said = f"left at once; {how_to_resume()}"
        tell(said)
        raise KeyboardInterrupt(said) from None
    except RunError as error:
        with_rescue = RunError("; ".join(filter(None, (str(error), rescue()))))
        with_rescue.frames = error.frames
        raise with_rescue from error
    except Exception:  # torch out of memory, a fault of ours: it goes on up as it is
        tell(rescue())
        raise


class Stop:
    """Set by a signal; a second signal interrupts at once. What is said then is said by a thread: the signal may have
    come in the middle of a message, and whoever sends that holds what a second one would wait for."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked = False
        self.doing = "leaving"
        """What will still be done after a signal, in words."""
        self._say = say
        self._texts: queue.SimpleQueue[str] = queue.SimpleQueue()  # takes texts also from a handler
        self._thread = threading.Thread(target=self._say_all, name="plait-stop", daemon=True)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._texts.put(f"{self.doing}; once more to leave at once")

    def __enter__(self) -> Stop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._texts.put("")
        self._thread.join(_SAID_S)

    def _say_all(self) -> None:
        while text := self._texts.get():
            self._say(text)


@contextlib.contextmanager
def stop_signals(tell: Callable[[str], None], numbers: Sequence[signal.Signals]) -> Iterator[Stop]:
    """These signals ask to stop while inside (in a main thread); what is done then, `tell` says."""
    with Stop(tell) as stop, signals_to(stop, numbers):
        yield stop
