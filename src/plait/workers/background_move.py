"""A planned move that a thread of its own does, while the rank goes on with something else.

On a GPU it has a stream of its own, too. What waits for a message there holds up all that the stream is asked for
behind it; and a step of generation whose tokens the leader waits for must not stand behind a message of which the
other side hears from the leader.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import torch

from plait.errors import RunError
from plait.reallocation.mover import MoveReport
from plait.schedule.work import Work, to_the_end

LOOK_S = 2e-4
"""Between two looks at a GPU: whether it is through."""


class BackgroundMove:
    """Begins at once.

    Args:
        work: this rank's part of the move. It waits for other ranks in its own thread; the status that the rank shows
            does not tell of that.
        name: of the thread.
        device: that has the buffers. Work that was queued on it before the move has its results in them; until the move
            is finished, nothing else may be queued that uses them.
    """

    def __init__(self, work: Work[MoveReport], name: str, device: torch.device) -> None:
        self._work, self._name = work, name
        self._report: MoveReport | None = None
        self._error: Exception | None = None
        self._aside = Aside(device) if device.type == "cuda" else None
        self._thread = threading.Thread(target=self._run, name=f"plait-{name}", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether `finish` would return, or raise, at once."""
        if self._thread.is_alive():
            return False
        return self._error is not None or self._aside is None or self._aside.is_through

    def wait(self, seconds: float) -> bool:
        """Whether it is through, in so many seconds at most.

        Raises:
            RunError: as of `finish`.
        """
        until = time.monotonic() + seconds
        self._thread.join(seconds)
        while not (is_done := self.is_done) and (left_s := until - time.monotonic()) > 0:
            time.sleep(min(LOOK_S, left_s))
        if self._error is not None:  # looked at last: the thread may have ended since
            raise self._error
        return is_done

    def finish(self, deadline_s: float) -> MoveReport:
        """Until it is through. What this thread asks the device for from now on finds what has come.

        Raises:
            RunError: a message did not come or go, a peer is gone, or it is not through at the deadline.
        """
        if not self.wait(deadline_s):
            raise RunError(f"{self._name}: expected what goes ahead to be through within {deadline_s:g} s")
        assert self._report is not None, "a move that is through, without an error, has said what it did"
        if self._aside is not None:
            self._aside.join()
        return self._report

    def _run(self) -> None:
        try:
            with nullcontext() if self._aside is None else self._aside.entered():
                self._report = to_the_end(self._work)
        except Exception as error:  # the thread's boundary: `finish` raises it
            self._error = error


class Aside:
    """The stream of moves of a GPU, as one of them uses it: behind what the GPU was asked for when it began."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before, self._through = torch.cuda.Event(), torch.cuda.Event()
        self._before.record(torch.cuda.current_stream(device))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within it this thread asks the stream; a thread begins on the first GPU, whichever its rank has."""
        with torch.cuda.device(self._device), torch.cuda.stream(_stream(self._device)):
            torch.cuda.current_stream(self._device).wait_event(self._before)
            yield
            self._through.record(torch.cuda.current_stream(self._device))

    @property
    def is_through(self) -> bool:
        """Whether all is done that was asked for; of a thread that has ended without an error."""
        return self._through.query()

    def join(self) -> None:
        """What is asked for from now on stands behind it."""
        torch.cuda.current_stream(self._device).wait_event(self._through)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all moves: memory that torch keeps for later is a stream's own."""
    return torch.cuda.Stream(device)
