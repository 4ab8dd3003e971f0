"""A planned move that a thread of its own does, while the rank goes on with something else."""

from __future__ import annotations

import threading

from plait.errors import RunError
from plait.reallocation.mover import MoveReport
from plait.schedule.work import Work, to_the_end


class BackgroundMove:
    """Begins at once.

    Args:
        work: this rank's part of the move. What it waits for others it waits in its thread, which has no say in what
            the rank's status is.
        name: of the thread.
    """

    def __init__(self, work: Work[MoveReport], name: str) -> None:
        self._work, self._name = work, name
        self._report: MoveReport | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"plait-{name}", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether `finish` would return, or raise, at once."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """Whether it is through, in so many seconds at most.

        Raises:
            RunError: as of `finish`.
        """
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error
        return self.is_done

    def finish(self, deadline_s: float) -> MoveReport:
        """Until it is through.

        Raises:
            RunError: a message did not come or go, a peer is gone, or it is not through at the deadline.
        """
        self._thread.join(deadline_s)
        if self._error is not None:
            raise self._error
        if self._report is None:
            raise RunError(f"{self._name}: expected what goes ahead to be through within {deadline_s:g} s")
        return self._report

    def _run(self) -> None:
        try:
            self._report = to_the_end(self._work)
        except Exception as error:  # the thread's boundary: `finish` raises it
            self._error = error
