"""What the controller knows of a rank: its open actions, when it was last heard of, and where it says that it is."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from plait.launch.failures import PeerState
from plait.launch.node import Process
from plait.launch.wire import Channel, Look, Raised, Reply, Seen


@dataclass
class Pending:
    """An action that a rank has been given and has not answered."""

    number: int
    method: str
    since: float
    """When it could begin: at its submission, or when its predecessor was answered."""


@dataclass
class Rank:
    """A rank of a group, as it is watched."""

    rank: int
    process: Process
    channel: Channel
    node: str = ""
    """Where it runs, in words; empty in a group of one machine."""
    pending: deque[Pending] = field(default_factory=deque)
    heard: bool = False
    """Since the clocks were last looked at."""
    ever_heard: bool = False
    silence_s: float = 0.0
    dead: bool = False
    seen: Seen | None = None
    look: int = 0
    """Number of the last Look sent."""

    def ask(self) -> bool:
        """Ask where it is; the answer will be `seen`. Returns whether the question went out at once."""
        self.seen = None
        self.look += 1
        return self.channel.put(Look(self.look))

    @property
    def answered(self) -> bool:
        return self.dead or not self.ever_heard or self.seen is not None

    @property
    def under_way(self) -> tuple[str, float]:
        """The action that it has been given and has not answered, and seconds since it could begin; ("", 0.0): none."""
        return (self.pending[0].method, time.monotonic() - self.pending[0].since) if self.pending else ("", 0.0)

    def state(self, *, dump: bool) -> PeerState:
        """What it is doing; with `dump`, a stack that it did not send is had by a signal."""
        (method, seconds), seen = self.under_way, self.seen or Seen(0, "", "")
        if not self.pending:
            return PeerState(self.rank, method, seconds, "", "", node=self.node)
        stack = seen.stack
        if dump and self.seen is None and self.ever_heard and not self.dead:
            stack = self.process.dump_stack()
        return PeerState(self.rank, method, seconds, seen.waits_for, stack, node=self.node, handles=seen.handles)


@dataclass(frozen=True)
class Held:
    """An exception of a rank that is held back: a peer's death may have been its cause."""

    since: float
    rank: Rank
    pending: Pending
    reply: Reply

    @property
    def state(self) -> PeerState:
        """What the rank was doing."""
        raised = self.reply.value
        assert isinstance(raised, Raised), f"action {self.reply.number} has a result"
        node = self.rank.node
        return PeerState(self.rank.rank, self.pending.method, self.reply.seconds, raised=raised.name, node=node)
