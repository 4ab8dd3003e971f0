"""What went wrong in a worker, as a record and as the error that the controller raises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from plait.errors import RunError


class Ended(Enum):
    """How an action failed to give its result."""

    RAISED = "raised"
    """It raised an exception; the worker goes on with its next action."""
    DIED = "died"
    """Its process is gone."""
    FROZEN = "frozen"
    """Its process sent no heartbeat for too long."""
    STALLED = "stalled"
    """Its process lives, but it did nothing for too long, and waited for nobody who did."""
    LATE = "late"
    """It was not done at the deadline of the one who waited; it goes on, and may be waited for again."""
    CLOSED = "closed"
    """The group was closed before it was done."""


@dataclass(frozen=True)
class PeerState:
    """What another rank was doing when an action failed."""

    rank: int
    action: str
    """Name of the method, or what the rank said that it did in it; empty if it had none to run."""
    seconds: float | None
    """For how long it had been running the method; None: of what the action names nobody knows."""
    waits_for: str = ""
    """What it had said to wait for (`WorkerContext.waiting_for`); empty if nothing."""
    stack: str = ""
    """Where its main thread was; empty if that could not be had or it was idle."""
    raised: str = ""
    """The exception that it had just raised, perhaps because of the failure."""
    node: str = ""
    """Where it runs; empty in a group of one machine."""
    handles: str = ""
    """The exception that it was handling; empty if none."""

    def __str__(self) -> str:
        who = _named(self.rank, self.node)
        if not self.action:
            return f"{who} was idle"
        if self.raised:
            return f"{who} raised in `{self.action}`{_timed(' after', self.seconds)}: {self.raised}"
        waits = f", waiting for {self.waits_for}" if self.waits_for else ""
        handles = f", handling {self.handles}" if self.handles else ""
        return f"{who} was in `{self.action}`{_timed(' for', self.seconds)}{waits}{handles}"


@dataclass(frozen=True)
class Failure:
    ended: Ended
    rank: int
    action: str
    """As of a peer; `start` while the worker was constructed; empty if the worker was idle."""
    seconds: float | None
    """As of a peer; 0 if it had not begun."""
    cause: str
    """What happened, in words that follow `rank R`."""
    traceback: str = ""
    """The worker's own: of the exception, or of where its main thread was; empty if it could not be had."""
    waits_for: str = ""
    """What the rank had said to wait for."""
    peers: tuple[PeerState, ...] = ()
    """The other ranks at that moment."""
    output: str = ""
    """The last lines that the rank printed."""
    output_file: str = ""
    """Where all that it printed is; empty if no folder was given."""
    node: str = ""
    """Where the rank runs, in words; empty in a group of one machine."""

    def __str__(self) -> str:
        action = f" in `{self.action}`{_timed(' after', self.seconds)}" if self.action else ""
        waits = f"; it was waiting for {self.waits_for}" if self.waits_for else ""
        parts = [f"{_named(self.rank, self.node)} {self.cause}{action}{waits}"]
        parts += [f"  meanwhile {peer}" for peer in self.peers]
        if self.traceback:
            parts.append(f"rank {self.rank}:\n{_indented(self.traceback)}")
        parts += [f"rank {peer.rank}:\n{_indented(peer.stack)}" for peer in self.peers if peer.stack]
        if self.output:
            where = f" (all of it: {self.output_file})" if self.output_file else ""
            parts.append(f"last output of rank {self.rank}{where}:\n{_indented(self.output)}")
        return "\n".join(parts)


Told = TypeVar("Told", PeerState, Failure)


def as_said(actions: Sequence[str], told: Told) -> Told:
    """With what its rank did in the method, where ranks have said what they do. One of them may have said nothing, as
    nobody has asked it for anything: how old its method is says no more of it than of the others."""
    if not any(actions):
        return told
    action = actions[told.rank] if told.rank < len(actions) else ""
    return replace(told, action=action or told.action, seconds=None)


class NodeLost(RunError):
    """A node of the group was lost before it had started its ranks."""


class WorkerError(RunError):
    """An action did not give its result. `__cause__` is the worker's exception where it can be sent."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure

    def __reduce__(self) -> tuple[type[WorkerError], tuple[Failure]]:
        return WorkerError, (self.failure,)


def _timed(word: str, seconds: float | None) -> str:
    return "" if seconds is None else f"{word} {seconds:.1f} s"


def _named(rank: int, node: str) -> str:
    return f"rank {rank} on {node}" if node else f"rank {rank}"


def _indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.rstrip().splitlines())
