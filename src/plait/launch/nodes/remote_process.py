"""A worker process of another node, as the leader has it: what it is asked goes to the node's agent."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Protocol

from plait.launch.nodes import messages
from plait.launch.nodes.agent import TICK_S

_ANSWER_S = 3.0
_DEATH_S = 10.0
"""To hear why a rank died: where its node is lost, whoever started that may be asked for some seconds."""


class Link(Protocol):
    """The leader's end of the node, as `link.NodeLink` has it."""

    gone: str
    exited: set[int]
    changed: threading.Condition

    @property
    def doubtful(self) -> bool: ...

    def ask(self, what: messages.Question, seconds: float) -> messages.Answer | None: ...

    def send(self, message: object) -> None: ...

    def kill(self) -> None: ...


class RemoteProcess:
    """A worker process of another node; see `process.WorkerProcess`, whose words these are."""

    def __init__(self, node: Link, rank: int, pid: int, link: socket.socket, output_file: Path | None) -> None:
        self.pid = pid
        self.link = link
        self._output_file = output_file
        self._node = node
        self._rank = rank
        self._killed = False

    @property
    def exited(self) -> bool:
        return bool(self._node.gone) or self._rank in self._node.exited

    @property
    def doubtful(self) -> bool:
        return self._node.doubtful

    def wait(self, deadline: float) -> bool:
        while not self.exited:
            if (left_s := deadline - time.monotonic()) <= 0:
                return False
            with self._node.changed:
                self._node.changed.wait(min(left_s, TICK_S))
        return True

    def state(self) -> str:
        return self._asked(messages.About.STATE)

    def dump_stack(self, *, stopped: bool = False) -> str:
        return self._asked(messages.About.STACK_OF_STOPPED if stopped else messages.About.STACK)

    def cause_of_death(self) -> tuple[str, str]:
        answer = None
        if not self._node.gone:
            answer = self._node.ask(messages.Question(self._rank, messages.About.DEATH), _DEATH_S)
        if self._node.gone or not isinstance(answer, tuple) or not answer:
            why = self._node.gone or "its agent does not say why"
            return f"is lost with its node: {why}", ""
        return answer[0], answer[1]

    def output(self) -> tuple[str, str]:
        return self._asked(messages.About.OUTPUT), str(self._output_file or "")

    def send_signal(self, number: int) -> None:
        self._node.send(messages.Signal(self._rank, number))

    def signal_group(self) -> None:
        """Nothing: the agent kills the ranks of its node all at once, see `kill`."""

    def kill(self) -> None:
        if self._killed:
            return
        self._killed = True
        self._node.kill()
        self.link.close()

    def _asked(self, about: messages.About) -> str:
        if self._node.gone or self._killed:
            return ""
        answer = self._node.ask(messages.Question(self._rank, about), _ANSWER_S)
        return answer[0] if isinstance(answer, tuple) and answer else ""
