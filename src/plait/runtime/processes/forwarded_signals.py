"""Forwards signals that ask to stop, from the process that the user started to the ranks that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from plait.launch.failures import Ended, Failure
from plait.launch.group import Group
from plait.runtime.stopping import LEADERS_SIGNAL
from plait.stop_signals import signals_to
from plait.workers.ranks import LEADER

_ONE_WISH_S = 2.0
"""Signals to several nodes in so short a time are one."""
LEAVE_S = 5.0
"""After a second signal, for the leader to leave."""


class ForwardedSignals:
    """Hands signals that ask to stop on to the leader, which ends its step and saves; at the second it leaves at once,
    and if it does not, so does this process.

    Args:
        ranks: that are told: the leader, or each that leads itself.
    """

    def __init__(self, group: Group, ranks: Sequence[int]) -> None:
        self._group, self._ranks = group, ranks
        self._asked = 0
        self._wished_s = -_ONE_WISH_S
        self._timer: threading.Timer | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - self._wished_s < _ONE_WISH_S:
            return
        self._asked += 1
        if self._asked > 2:
            raise KeyboardInterrupt
        # From a thread: the signal may have come in the middle of a message.
        threading.Thread(target=self._tell, daemon=True).start()
        if self._asked == 2:
            self._timer = threading.Timer(LEAVE_S, lambda: os.kill(os.getpid(), signal.SIGINT))
            self._timer.daemon = True
            self._timer.start()

    @property
    def asked(self) -> bool:
        """Whether one came."""
        return self._asked > 0

    def wished(self) -> None:
        """A node was asked to stop the run: as a first signal here. Slurm signals all nodes at once."""
        if self._asked == 0:
            self._asked, self._wished_s = 1, time.monotonic()
            self._tell()

    def _tell(self) -> None:
        for rank in self._ranks:
            self._group.signal(rank, LEADERS_SIGNAL)

    def end(self) -> None:
        """The run has ended: nobody is to be interrupted for it any more."""
        if self._timer is not None:
            self._timer.cancel()

    def ended_it(self, failure: Failure) -> bool:
        """Whether a rank died of a forwarded signal before it could take it."""
        return self._asked > 0 and failure.ended is Ended.DIED and failure.rank in self._ranks


@contextlib.contextmanager
def forwarding_signals(group: Group, ranks: Sequence[int] = (LEADER,)) -> Iterator[ForwardedSignals]:
    """While inside, signals to this process go on to the group's leader, or to ranks that lead themselves."""
    signals = ForwardedSignals(group, ranks)
    with contextlib.ExitStack() as stack:
        stack.callback(signals.end)
        stack.enter_context(signals_to(signals))
        yield signals
