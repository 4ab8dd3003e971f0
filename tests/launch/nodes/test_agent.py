"""The process of a node, in a thread of this one, with a leader that says what it is told to."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

from plait.launch.nodes import messages
from plait.launch.nodes.agent import Agent, who
from plait.launch.nodes.relay import Relay
from plait.launch.wire import Channel

KEY = bytes(range(32))
LIMIT_S = 30.0


def answers_of(me: messages.Joined, *asked: messages.Launch | messages.Echo) -> list[messages.Answer]:
    """What an agent answers, in the order in which it is asked."""
    ours, theirs = socket.socketpair()
    said: list[str] = []
    agent = Agent(Channel(theirs, KEY, controller=False), KEY, me, said.append)
    thread = threading.Thread(target=agent.serve)
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
    assert launched[0].startswith("cannot start its ranks: the address 203.0.113.7 is none of this machine's")
    assert isinstance(clock, messages.Clock)
