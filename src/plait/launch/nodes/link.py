"""The leader's end of a node: its ranks as processes that are asked over its connection, and its loss."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from plait.errors import RunError
from plait.launch.failures import NodeLost
from plait.launch.node import Began, Order
from plait.launch.nodes import messages
from plait.launch.nodes.agent import BEAT_S, TICK_S
from plait.launch.nodes.echoes import Reach, clock_ahead_s, reach_of
from plait.launch.nodes.introduction import worker_key
from plait.launch.nodes.relay import Cut, Relay
from plait.launch.nodes.remote_process import RemoteProcess
from plait.launch.wire import Channel
from plait.launch.worker_context import Place

DOUBT_S = 2.5 * BEAT_S
"""Silence after which a node may be lost: an error of a rank may then have that as its cause."""
_START_S = 60.0
_ANSWER_S = 3.0
_GONE_S = 12.0
"""For all processes of a node to be gone."""
_FULL = 0.9
"""Share of a node's memory in use, at which its loss may be for want of more."""


class NodeLink:
    """A node that has joined. One thread carries what it and its ranks say.

    Args:
        channel: to its agent, which has shown that it has the run's key.
        key: of the connection.
        joined: who it says that it is.
        silent_after_s: without a word of it, after which it counts as lost.
        explain: says more of why a node was lost, if anybody knows; empty if not.
    """

    def __init__(
        self,
        channel: Channel,
        key: bytes,
        joined: messages.Joined,
        silent_after_s: float,
        explain: Callable[[], str] = lambda: "",
    ) -> None:
        self.joined = joined
        self.name, self.node = joined.label, joined.node
        self.cores, self.devices, self.own_devices = joined.cores, joined.devices, joined.own_devices
        self.on_loss: Callable[[str], None] | None = None
        """Told where the node is lost and has no ranks, whose loss would be told."""
        self._wished: Callable[[], None] | None = None
        self._unheard_wish = False
        self.explain = explain
        self.gone = ""
        """Why the node is lost; empty while it is there."""
        self.changed = threading.Condition(threading.RLock())
        self.exited: set[int] = set()
        self._relay = Relay(channel)
        self._key = key
        self._silent_after_s = silent_after_s
        self._numbers = itertools.count(1)
        self._answers: dict[int, messages.Answer] = {}
        self._group = -1
        """That its ranks belong to: of an earlier one, nothing is heard any longer."""
        self._status: Path | None = None
        self._used_bytes = 0
        self._running = self._ending = False
        self._thread = threading.Thread(target=self._run, name=f"plait-node-{joined.task}", daemon=True)
        self._thread.start()

    @property
    def doubtful(self) -> bool:
        """Whether it has been silent for longer than it ever is."""
        return bool(self.gone) or self._relay.silence_s > DOUBT_S

    def on_wish(self, wished: Callable[[], None] | None) -> None:
        """Have it called when the agent was asked by a signal to stop the run, or now where it was asked while there
        was nobody to call. None: from now on there is nobody."""
        with self.changed:
            self._wished = wished
            if wished is None or not self._unheard_wish:
                return
            self._unheard_wish = False
        wished()

    def begin(self, order: Order) -> Began:
        """See `Node.begin`.

        Raises:
            RunError: the node could not start its ranks.
        """
        key = worker_key(self._key, order.group)
        ends: list[socket.socket] = []
        with self.changed:
            self._status, self._group = order.status, order.group
            self.exited.clear()
            self._running = True
        for rank in order.ranks:
            ours, theirs = socket.socketpair()
            ends.append(ours)
            self._relay.attach(rank, theirs)
        folder = None if order.output_dir is None else str(order.output_dir)
        environment = tuple(order.environment.items())
        ranks, working_folder = tuple(order.ranks), os.getcwd()
        ahead_s = clock_ahead_s(lambda echo: self.ask(echo, _START_S))
        launched = self.ask(
            messages.Launch(order.group, ranks, order.num_ranks, environment, folder, working_folder, order.line_bytes),
            _START_S,
        )
        if not isinstance(launched, messages.Launched):
            for end in ends:
                end.close()
            if self.gone:
                raise NodeLost(f"{self.name} is lost: {self.gone}")
            why = "".join(launched) if isinstance(launched, tuple) else ""
            raise RunError(f"{self.name} {why or 'did not start its ranks'}")
        processes = [
            RemoteProcess(self, rank, pid, end, order.output_of(rank))
            for rank, pid, end in zip(order.ranks, launched.pids, ends, strict=True)
        ]
        places = [
            Place(
                self.node,
                self.joined.host,
                index if self.joined.own_devices else order.first_local + index,
                self.joined.address,
                Path(launched.status),
                ahead_s,
            )
            for index in range(len(order.ranks))
        ]
        return Began(processes, key, places)

    def touch(self, path: Path, text: str) -> str:
        """Have the node write a file; empty if it did, else why not."""
        why = self.ask(messages.Touch(str(path), text), _START_S)
        return self.gone or ("".join(why) if isinstance(why, tuple) else "it did not answer")

    def measure(self) -> Reach | None:
        """What messages to the node take; None: it does not answer."""
        return reach_of(lambda echo: self.ask(echo, _ANSWER_S))

    def send(self, message: object) -> None:
        self._relay.send(message)

    def ask(
        self,
        what: messages.Launch | messages.Question | messages.Touch | messages.Echo | messages.Kill,
        seconds: float = _ANSWER_S,
    ) -> messages.Answer | None:
        """What the agent answers; None if it does not in time, or is lost."""
        number = next(self._numbers)
        self._relay.send(messages.Instruction(number, what))
        self._wait(lambda: self._answers.get(number), seconds)
        with self.changed:
            return self._answers.pop(number, None)

    def kill(self) -> None:
        """End all ranks of the node, and wait until they are gone, or the node is lost."""
        with self.changed:
            running, self._running = self._running, False
        if running and not self.gone:
            self.ask(messages.Kill(), _GONE_S)

    def end(self, code: int, text: str) -> None:
        """Let the agent leave with an exit code."""
        with self.changed:
            self._ending = True
        if not self.gone:
            self._relay.send(messages.End(code, text))
            self._wait(lambda: self.gone or None, _ANSWER_S)
        self._thread.join(_ANSWER_S)

    # -- the thread

    def _wait(self, condition: Callable[[], object], seconds: float) -> None:
        """Until the condition gives something, the node is lost, or time is up."""
        end = time.monotonic() + seconds
        with self.changed:
            while condition() is None and not self.gone and (left_s := end - time.monotonic()) > 0:
                self.changed.wait(left_s)

    def _run(self) -> None:
        why, beat = "", time.monotonic()
        try:
            while not why:
                for message in self._relay.turn(TICK_S):
                    why = self._take(message) or why
                if self._relay.silence_s > self._silent_after_s:
                    silence = f"nothing was received from it for {self._relay.silence_s:.0f} s"
                    why = f"{silence} (the network is down, or it is frozen)"
                if time.monotonic() - beat >= BEAT_S:
                    beat = time.monotonic()
                    self._relay.send(messages.Alive())
        except Cut as cut:
            why = f"{cut} (its process or its machine has ended)"
        except BaseException as error:  # a defect of ours: who waits is told
            why = f"the leader's end of it failed: {error!r}"
        more = "" if self._ending else self.explain()
        with self.changed:
            self.gone = "; ".join(filter(None, (why, self._full_memory(), more)))
            # Asked before others hear of it: those who end its ranks for it say it, too.
            is_told = self._running or self._ending
            self.changed.notify_all()
        self._relay.close()
        if self.on_loss is not None and not is_told:
            self.on_loss(f"{self.name} is lost: {self.gone}")

    def _full_memory(self) -> str:
        """What is to be said where the node's memory was nearly all used when it was last heard; else nothing."""
        used, whole = self._used_bytes, self.joined.memory_bytes
        if used < _FULL * whole:
            return ""
        return f"its memory was {used / whole:.0%} full at the last report ({_gib(used)} of {_gib(whole)})"

    def _take(self, message: object) -> str:
        """Why the node goes, if it does."""
        match message:
            case messages.Alive(used_bytes):
                self._used_bytes = used_bytes
            case messages.Lines(group, start, data):
                if group == self._group:
                    self._mirror(start, data)
            case messages.Exited(group, rank):
                with self.changed:
                    if group == self._group:
                        self.exited.add(rank)
                        self.changed.notify_all()
            case messages.Answered(number, answer):
                with self.changed:
                    self._answers[number] = answer
                    self.changed.notify_all()
            case messages.Wish():
                with self.changed:
                    wished, self._unheard_wish = self._wished, self._wished is None
                if wished is not None:
                    wished()
            case messages.Leaving(why):
                return why
            case _:
                raise AssertionError(f"the leader was sent {message}")
        return ""

    def _mirror(self, start: int, data: bytes) -> None:
        """Lines of the node's status file, where those of all ranks are read."""
        if self._status is None:
            return
        try:
            file = os.open(self._status, os.O_WRONLY)
        except OSError:  # the run is over
            return
        try:
            os.pwrite(file, data, start)
        finally:
            os.close(file)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
