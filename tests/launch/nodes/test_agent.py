"""The process of a node, in a thread of this one, with a leader that says what it is told to."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from plait.launch import machine
from plait.launch.machine import versions
from plait.launch.nodes import agent, messages
from plait.launch.nodes.agent import Agent, who
from plait.launch.nodes.relay import Relay
from plait.launch.wire import Channel

KEY = bytes(range(32))
LIMIT_S = 30.0


def answers_of(me: messages.Joined, *asked: messages.Launch | messages.Echo) -> list[messages.Answer]:
    """What an agent answers, in the order in which it is asked."""
    ours, theirs = socket.socketpair()
    said: list[str] = []
    served = Agent(Channel(theirs, KEY, controller=False), KEY, me, said.append)
    thread = threading.Thread(target=served.serve)
    thread.start()
    leader, answers = Relay(Channel(ours, KEY, controller=True)), []
    for number, what in enumerate(asked):
        leader.send(messages.Instruction(number, what))
    end = time.monotonic() + LIMIT_S
    while len(answers) < len(asked) and time.monotonic() < end:
        answers += [one.answer for one in leader.turn(0.05) if isinstance(one, messages.Answered)]
    leader.send(messages.End(0, ""))
    thread.join(LIMIT_S)
    leader.close()
    return answers


def test_an_address_that_is_gone_when_ranks_are_to_start_is_told_and_the_agent_goes_on(tmp_path: Path) -> None:
    me = replace(who(1, 1, "127.0.0.1", own_devices=False), address="203.0.113.7")
    launch = messages.Launch(0, (1,), 2, (), None, str(tmp_path), 128)
    launched, clock = answers_of(me, launch, messages.Echo(b""))
    assert isinstance(launched, tuple)
    assert launched[0].startswith("cannot start its ranks: this machine does not have the address 203.0.113.7")
    assert isinstance(clock, messages.Clock)


def test_a_node_without_room_for_files_says_so_to_the_leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(purpose: str) -> None:
        raise OSError(28, "No space left on device", "/tmp")

    monkeypatch.setattr(agent, "TemporaryFolder", full)
    me = who(1, 1, "127.0.0.1", own_devices=False)
    [launched] = answers_of(me, messages.Launch(0, (1,), 2, (), None, str(tmp_path), 128))
    assert launched == ("cannot start its ranks: [Errno 28] No space left on device: '/tmp'",)


def test_code_of_plait_that_differs_is_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "plait" / "launch"
    package.mkdir(parents=True)
    monkeypatch.setattr(machine, "__file__", str(package / "machine.py"))
    digests = []
    for text in ("a = 1", "a = 2", "a = 2"):
        (package / "machine.py").write_text(text)
        (package / "notes.txt").write_text(str(len(digests)))
        (package / f".#{len(digests)}.py").symlink_to("me@here.1")  # as an editor that has a file open
        digests.append(dict(versions())["the source of plait with digest"])
    assert digests[0] != digests[1] == digests[2]
