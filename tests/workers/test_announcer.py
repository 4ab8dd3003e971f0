"""The leader's word: who is told what, under which number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from plait.workers.announcer import Announcer
from plait.workers.messages import Message
from plait.workers.upkeep import Spans


class Sent:
    """A transport that keeps what it is given."""

    def __init__(self) -> None:
        self.messages: dict[int, Message] = {}

    def send(self, rank: int, message: Message, what: str) -> None:
        self.messages[rank] = message


def announcer(sent: Sent) -> Announcer:
    state: Any = SimpleNamespace(copies={}, held_copies={}, take=lambda number, command: (number, command))
    recorder: Any = SimpleNamespace(step=7)
    transport: Any = sent
    status: Any = None
    return Announcer(state, transport, recorder, status)


def test_each_rank_is_told_its_own_message_under_one_number() -> None:
    sent = Sent()
    leader = announcer(sent)
    leader.send((0, 1, 2, 3), Message({}, kind="end"))
    own = {rank: Message({"mine": rank}, (np.full(2, rank),), "score") for rank in (1, 2, 3)}
    assert leader.send((0, 1, 2, 3), own) == 1
    for rank in (1, 2, 3):
        message = sent.messages[rank]
        assert (message.header, message.kind, message.number, message.step) == ({"mine": rank}, "score", 1, 7)
        assert message.arrays[0].tolist() == [rank, rank]


def test_one_command_is_for_all_and_the_leader_is_told_as_the_others() -> None:
    sent = Sent()
    leader = announcer(sent)
    told: Any = leader.tell((2, 0, 1), Spans(0.5))
    assert sorted(sent.messages) == [1, 2]
    assert all(Spans.of(message) == Spans(0.5) for message in sent.messages.values())
    assert (told.own, told.is_joint) == ((0, Spans(0.5)), True)
    assert leader.tell((2, 1), Spans(0.5)).own is None
