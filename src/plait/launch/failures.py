"""What went wrong in a worker, as a record and as the error that the controller raises."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
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
    """It had not ended at the caller's deadline; it goes on, and the caller may wait again."""
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
    """Stack of its main thread; empty if it was idle or the stack could not be read."""
    raised: str = ""
    """The exception that it had just raised, perhaps because of the failure."""
    node: str = ""
    """Where it runs; empty in a group of one machine."""
    handles: str = ""
    """The exception that it was handling; empty if none."""


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
        parts = [f"{_named((self.rank,), self.node)} {self.cause}{action}{waits}"]
        parts += [f"  meanwhile {_told(peers)}" for peers in _alike(self.peers, _state)]
        if self.traceback:
            parts.append(f"rank {self.rank}:\n{_indented(self.traceback)}")
        for peers in _alike([peer for peer in self.peers if self._needs_stack(peer)], lambda peer: peer.stack):
            parts.append(f"{_named([peer.rank for peer in peers])}:\n{_indented(peers[0].stack)}")
        if self.output:
            where = f" (all of it: {self.output_file})" if self.output_file else ""
            parts.append(f"last output of rank {self.rank}{where}:\n{_indented(self.output)}")
        return "\n".join(parts)

    def _needs_stack(self, peer: PeerState) -> bool:
        """Whether a rank's stack helps a reader. Not if the rank says for whom it waits, unless ranks wait for each
        other."""
        return bool(peer.stack) and (not peer.waits_for or self.ended in (Ended.STALLED, Ended.LATE))


Told = TypeVar("Told", PeerState, Failure)


def as_said(actions: Sequence[str], told: Told) -> Told:
    """The record with the action that the rank reported within its method, if ranks report any. `seconds` becomes None
    then: it is the age of the method, and says nothing of the action."""
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


def _alike(peers: Sequence[PeerState], what: Callable[[PeerState], Hashable]) -> list[list[PeerState]]:
    """Groups of ranks that are told of in one sentence: there may be hundreds of ranks."""
    groups: dict[Hashable, list[PeerState]] = {}
    for peer in peers:
        groups.setdefault(what(peer), []).append(peer)
    return list(groups.values())


def _state(peer: PeerState) -> PeerState:
    """What is told of a rank; tenths of seconds make no difference."""
    return replace(peer, rank=0, stack="", seconds=None if peer.seconds is None else round(peer.seconds))


def _told(peers: Sequence[PeerState]) -> str:
    """Ranks in the same state, in words."""
    peer, who = peers[0], _named([peer.rank for peer in peers], peers[0].node)
    was = "was" if len(peers) == 1 else "were"
    if not peer.action:
        return f"{who} {was} idle"
    if peer.raised:
        return f"{who} raised in `{peer.action}`{_timed(' after', peer.seconds)}: {peer.raised}"
    waits = f", waiting for {peer.waits_for}" if peer.waits_for else ""
    handles = f", handling {peer.handles}" if peer.handles else ""
    return f"{who} {was} in `{peer.action}`{_timed(' for', peer.seconds)}{waits}{handles}"


def _named(ranks: Sequence[int], node: str = "") -> str:
    """`rank 3`, or `ranks 0, 4-7`; and where."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    listed = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' * (len(ranks) > 1)} {listed}{f' on {node}' * bool(node)}"


def _indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.rstrip().splitlines())
