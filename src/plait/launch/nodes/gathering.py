"""The leader waits until all other commands of the run have joined it; then it listens no longer."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from plait.errors import ConfigError, RunError
from plait.launch.node import Node
from plait.launch.nodes.gathered import Gathered, ended_by
from plait.launch.nodes.introduction import GREETING_S, Stranger, welcomed
from plait.launch.nodes.link import NodeLink
from plait.launch.nodes.messages import Joined, Note, Welcome
from plait.launch.wire import Channel, Forged

JOIN_S = 180.0
"""For all nodes to come."""
NODE_SILENT_S = 15.0
"""Without a word, after which a node, or its leader, counts as lost: half of what a rank has."""
_MOST_GREETINGS = 64


@dataclass
class NodeRendezvous:
    """Where all commands of a run come to its leader, which waits for them.

    Args:
        listener: closed when `wait` returns or raises.
        tasks: numbers of the commands that are to come.
        own: what this command would say of itself: versions must be equal.
        silent_after_s: without a word of a node, or of its leader there, after which it counts as lost.
        told: is told who has come.
        wished: is called when one of them is asked by a signal to stop the run.
        missed: is told by a thread which of them is lost while it has no ranks.
    """

    listener: socket.socket
    key: bytes
    tasks: Collection[int]
    own: Joined
    silent_after_s: float = NODE_SILENT_S
    told: Callable[[str], None] = lambda text: None
    wished: Callable[[], None] | None = None
    missed: Callable[[str], None] | None = None
    _come: queue.SimpleQueue[NodeLink] = field(default_factory=queue.SimpleQueue, init=False)
    """Those that have said who they are, and are not admitted yet."""
    _links: dict[int, NodeLink] = field(default_factory=dict, init=False)
    """Number of a command → the one that has come."""
    _greeting: threading.BoundedSemaphore = field(
        default_factory=lambda: threading.BoundedSemaphore(_MOST_GREETINGS), init=False
    )
    _turned_away: dict[str, str] = field(default_factory=dict, init=False)
    """Address of a stranger → why it is one."""

    def wait(self, place: Node | None, *, deadline_s: float = JOIN_S, lost: Callable[[], str] = lambda: "") -> Gathered:
        """Wait for all commands of the run.

        Args:
            place: of ranks in this process's machine; None: none are to be here.
            lost: why it is no use to wait any longer; empty while it is.

        Raises:
            RunError: some have not come in time, or will not; names those that have.
            ConfigError: one has another version of something, or other files.
        """
        end = time.monotonic() + deadline_s
        try:
            with self.listener:
                while set(self._links) != set(self.tasks):
                    self._accept()
                    with contextlib.suppress(queue.Empty):
                        while True:
                            self._admit(self._come.get_nowait())
                    links = self._links.values()
                    why = next((f"{link.name} is lost: {link.gone}" for link in links if link.gone), "") or lost()
                    if why or time.monotonic() >= end:
                        raise RunError(self._missing(why or f"not there after {deadline_s:g} s"))
        except BaseException as error:
            for link in self._links.values():
                link.end(*ended_by(error))
            raise
        gathered = Gathered(list(self._links.values()), place)
        try:
            gathered.check_equal()
        except ConfigError as error:
            gathered.end(2, str(error))
            raise
        return gathered

    def refuse(self, error: BaseException, within_s: float) -> None:
        """End the commands that come, as a run that this error ends; until all have come, or for so long."""
        end, come = time.monotonic() + within_s, set[int]()
        with self.listener:
            while not come.issuperset(self.tasks) and time.monotonic() < end:
                self._accept()
                with contextlib.suppress(queue.Empty):
                    while True:
                        link = self._come.get_nowait()
                        come.add(link.joined.task)
                        link.end(*ended_by(error))

    def _accept(self) -> None:
        """Take a connection if there is one. A thread of its own asks who it is, so that strangers hold up nobody."""
        if not select.select([self.listener], [], [], 0.1)[0]:
            return
        link, (host, _) = self.listener.accept()
        if not self._greeting.acquire(blocking=False):
            link.close()
            return

        def greet() -> None:
            try:
                channel, own = welcomed(link, self.key)
                self._come.put(NodeLink(channel, own, _first_word(channel), self.silent_after_s))
                self._turned_away.pop(host, None)  # it had another run's key at first
            except Stranger as stranger:
                self._turned_away[host] = str(stranger)
            finally:
                self._greeting.release()

        threading.Thread(target=greet, name="plait-greeting", daemon=True).start()

    def _admit(self, link: NodeLink) -> None:
        """Take a command into the run, or have it leave where it is none of it. Raises ConfigError as `wait`."""
        task, name, tasks, own = link.joined.task, link.name, self.tasks, self.own
        if task not in tasks or task in self._links:
            other = f"expected {min(tasks)} to {max(tasks)}"
            if task in self._links:
                other = f"it is {self._links[task].name} already"
            link.end(2, f"this command says that it is number {task} of the run, but {other}; see --node")
            return
        for (what, version), (_, ours) in zip(link.joined.versions, own.versions, strict=False):
            if version != ours:
                text = f"{name} has {what} {version}, {own.label} has {ours}; install the same on all nodes"
                link.end(2, text)
                raise ConfigError(text)
        if other_files := link.joined.other_files(own):
            keys = ", ".join(other_files)
            text = f"{name} and {own.label} have different files under {keys}; copy the same to all nodes"
            link.end(2, text)
            raise ConfigError(text)
        self._links[task] = link
        link.send(Welcome(self.silent_after_s))
        link.on_wish(self.wished)
        link.on_loss = self.missed
        self.told(f"{name} has joined ({len(self._links)} of {len(tasks)})")
        if unlike := link.joined.unlike(own):
            text = f"{name} was started with another recipe than {own.label}, whose is used: {'; '.join(unlike)}"
            self.told(text)
            link.send(Note(text))

    def _missing(self, why: str) -> str:
        """Who has not come, for a message."""
        address, port = self.listener.getsockname()
        waiting = ", ".join(str(task) for task in sorted(set(self.tasks) - set(self._links)))
        there = ", ".join(link.name for link in self._links.values()) or "none"
        strangers = ", ".join(f"{host} ({fault})" for host, fault in list(self._turned_away.items()))
        there += f"; turned away: {strangers}" if strangers else ""
        return (
            f"expected {len(self.tasks)} more commands of this run to join at {address}:{port}; {why}: number "
            f"{waiting} has not come, joined: {there}. Are they started, with the same --leader, and does a firewall "
            "let this port through?"
        )


def _first_word(channel: Channel) -> Joined:
    end = time.monotonic() + GREETING_S
    try:
        while (left_s := end - time.monotonic()) > 0 and not channel.ended:
            if select.select([channel.link], [], [], left_s)[0]:
                for message in channel.receive():
                    if isinstance(message, Joined):
                        return message
    except Forged as error:
        channel.link.close()
        raise Stranger(str(error)) from error
    except Exception as error:  # what it pickled is of classes that this version has otherwise
        channel.link.close()
        raise Stranger(f"it runs another version of plait: {error!r}") from error
    channel.link.close()
    raise Stranger("it has not said who it is")
