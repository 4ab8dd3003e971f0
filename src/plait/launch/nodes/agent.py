"""The process of a node: starts the ranks that the leader asks for, carries what they say, and ends with the leader."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path

from plait import memory_limits
from plait.errors import ConfigError, RunError
from plait.launch.machine import hardware, usable_cores, versions, visible_devices
from plait.launch.nodes import messages
from plait.launch.nodes.interfaces import interface_variables
from plait.launch.nodes.introduction import worker_key
from plait.launch.nodes.relay import Cut, Relay
from plait.launch.process import WorkerProcess
from plait.launch.wire import Channel
from plait.temporary_folder import TemporaryFolder

TICK_S = 0.1
BEAT_S = 1.0
_LAST_WORDS_S = 2.0
_GIVEN_UP = 2
"""Ranks end after so many times the silence after which the leader gives this node up: it has done so by then."""
_WELCOME_S = 60.0
"""Silence of a leader that has not said yet how long it may be."""


@dataclass
class Own:
    """The ranks of this node, while there are some."""

    order: messages.Launch
    processes: dict[int, WorkerProcess]
    status: Path
    told: set[int]
    """Whose end has been said."""
    seen: bytes = b""
    """What has been said of the status file."""


class Agent:
    """One connection to the leader, from its introduction to its end.

    Args:
        channel: to the leader, who has shown that it has the run's key.
        key: of the connection.
        joined: who this is.
        say: is told what a person at this node should know.
    """

    def __init__(self, channel: Channel, key: bytes, joined: messages.Joined, say: Callable[[str], None]) -> None:
        self._relay = Relay(channel)
        self._key = key
        self._joined = joined
        self._silent_after_s = _WELCOME_S
        self._say = say
        self._own: Own | None = None
        self._folder: TemporaryFolder | None = None
        """Has the status files of its groups, once it has been asked for one."""
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._signals = 0
        self._beat = time.monotonic()
        threading.Thread(target=self._do_jobs, name="plait-node", daemon=True).start()

    def serve(self) -> int:
        """Until the leader ends the run; the exit code that it gives.

        Raises:
            RunError: the leader is lost, or a second signal has come. No rank is left.
        """
        relay = self._relay
        relay.send(self._joined)
        try:
            while True:
                for message in relay.turn(TICK_S):
                    if isinstance(message, messages.End):
                        if message.text:
                            self._say(message.text)
                        return message.code
                    self._take(message)
                self._look_after()
        except KeyboardInterrupt:
            relay.send(messages.Leaving("it was interrupted twice"))
            raise
        except Cut as cut:
            raise RunError(f"the leader is lost: {cut}; the ranks of this node are ended") from None
        finally:
            self._end_ranks()
            with contextlib.suppress(OSError):
                relay.flush(_LAST_WORDS_S)
            relay.close()
            if self._folder is not None:
                self._folder.close()

    def signalled(self, number: int, frame: object) -> None:
        """A handler of signals that ask to stop: the first asks the leader to stop the run, the second ends this."""
        self._signals += 1
        if self._signals == 1:
            # From a thread: the signal may have come in the middle of a message.
            threading.Thread(target=self._wish, name="plait-wish", daemon=True).start()
        else:
            raise KeyboardInterrupt

    def _wish(self) -> None:
        # Said first: what node 0 says of it comes behind.
        self._say("node 0 is asked to stop the run; once more to end the ranks of this node at once")
        self._relay.send(messages.Wish())

    # -- what the leader says

    def _take(self, message: object) -> None:
        match message:
            case messages.Alive():
                pass
            case messages.Welcome(silent_after_s):
                self._silent_after_s = silent_after_s
                self._say(f"{self._joined.label} has joined the run")
            case messages.Note(text):
                self._say(text)
            case messages.Instruction(number, what):
                self._jobs.put(partial(self._answer, number, what))
            case messages.Signal(rank, number):
                if self._own is not None and rank in self._own.processes:
                    self._own.processes[rank].send_signal(number)
            case _:
                raise AssertionError(f"a node was sent {message}")

    def _do_jobs(self) -> None:
        """Do jobs that may take a while, one after another; messages are relayed meanwhile."""
        while True:
            self._jobs.get()()

    def _answer(self, number: int, what: object) -> None:
        self._relay.send(messages.Answered(number, self._done(what)))

    def _done(self, what: object) -> messages.Answer:
        """Do what the leader asks for; the answer to it."""
        match what:
            case messages.Launch():
                return self._launched(what)
            case messages.Question(rank, about):
                process = self._own.processes.get(rank) if self._own is not None else None
                return () if process is None else self._asked(process, about)
            case messages.Touch(path, text):
                try:
                    Path(path).write_text(text)
                except OSError as error:
                    return (f"it cannot be written there: {error.strerror}",)
                return ()
            case messages.Echo():
                return messages.Clock(time.perf_counter())
            case messages.Kill():
                self._end_ranks()
                return ()
            case _:
                raise AssertionError(f"a node was asked for {what}")

    def _launched(self, order: messages.Launch) -> messages.Answer:
        self._end_ranks()
        key = worker_key(self._key, order.group)
        processes: dict[int, WorkerProcess] = {}
        try:
            self._folder = self._folder or TemporaryFolder("node")
            status = self._folder.path / f"status-{order.group}"
            environment = {**interface_variables(self._joined.address, os.environ), **dict(order.environment)}
            status.write_bytes(b"\0" * (order.num_ranks * order.line_bytes))
            folder = None if order.output_dir is None else Path(order.output_dir)
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            for rank in order.ranks:
                output = None if folder is None else folder / f"rank{rank}.log"
                processes[rank] = WorkerProcess(
                    key, environment, output, Path(order.folder), silent_after_s=ceil(_GIVEN_UP * self._silent_after_s)
                )
        except (ConfigError, OSError) as error:
            for process in processes.values():
                process.kill()
            return (f"cannot start its ranks: {error}",)
        # The leader has these streams before it is told of them: what workers say first is not lost.
        for rank, process in processes.items():
            self._relay.attach(rank, process.link)
        self._own = Own(order, processes, status, set())
        return messages.Launched(tuple(process.pid for process in processes.values()), str(status))

    def _asked(self, process: WorkerProcess, about: messages.About) -> tuple[str, ...]:
        match about:
            case messages.About.STATE:
                return (process.state(),)
            case messages.About.STACK:
                return (process.dump_stack(),)
            case messages.About.STACK_OF_STOPPED:
                return (process.dump_stack(stopped=True),)
            case messages.About.OUTPUT:
                return process.output()[:1]
            case messages.About.DEATH:
                cause = process.cause_of_death()
                self._tell_lines()  # before the answer: what it did when it died
                return cause

    # -- what is looked after

    def _look_after(self) -> None:
        if self._relay.silence_s > self._silent_after_s:
            raise Cut(
                f"nothing was received from it for {self._relay.silence_s:.0f} s (the network is down, or it is frozen)"
            )
        if beats := time.monotonic() - self._beat >= BEAT_S:
            self._beat = time.monotonic()
            self._relay.send(messages.Alive(memory_limits.used_bytes()))
        own = self._own
        if own is None:
            return
        self._tell_lines()
        if beats:
            for process in own.processes.values():
                process.beat()
        for rank, process in own.processes.items():
            if rank not in own.told and process.exited:
                own.told.add(rank)
                self._relay.send(messages.Exited(own.order.group, rank))

    def _tell_lines(self) -> None:
        own = self._own
        if own is None:
            return
        with contextlib.suppress(OSError):
            now = own.status.read_bytes()
            if now != own.seen:
                own.seen = now
                width = own.order.line_bytes
                for rank in own.order.ranks:
                    line = now[rank * width : (rank + 1) * width]
                    self._relay.send(messages.Lines(own.order.group, rank * width, line))

    def _end_ranks(self) -> None:
        own, self._own = self._own, None
        if own is None:
            return
        for process in own.processes.values():
            process.signal_group()  # all at once, so that none sees another's end for long
        for rank, process in own.processes.items():
            self._relay.detach(rank)
            process.kill()


def who(
    task: int,
    node: int,
    address: str,
    *,
    own_devices: bool,
    keys: tuple[tuple[str, str], ...] = (),
    files: tuple[tuple[str, str], ...] = (),
) -> messages.Joined:
    """What this process says of itself and of its machine. Arguments: see `Joined`."""
    return messages.Joined(
        task,
        node,
        socket.gethostname(),
        os.getpid(),
        address,
        visible_devices(),
        own_devices,
        usable_cores(),
        memory_limits.limit().bytes,
        versions(),
        hardware(),
        keys,
        files,
    )
