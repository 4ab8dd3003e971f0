"""The leader's word: who is told what, under which number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from plait.workers.announcer import Announcer
from plait.workers.messages import Do, Message


class Sent:
    """A transport that keeps what it is given."""

    def __init__(self) -> None:
        self.messages: dict[int, Message] = {}

    def send(self, rank: int, message: Message, what: str) -> None:
        self.messages[rank] = message


def announcer(sent: Sent) -> Announcer:
    state: Any = SimpleNamespace(copies={})
    recorder: Any = SimpleNamespace(step=7)
    transport: Any = sent
    status: Any = None
    return Announcer(state, transport, recorder, status)


def test_each_rank_is_told_its_own_message_under_one_number() -> None:
    sent = Sent()
    leader = announcer(sent)
    leader.tell((0, 1, 2, 3), Message({"do": Do.END}))
    own = {rank: Message({"do": Do.SCORE, "mine": rank}, (np.full(2, rank),)) for rank in (1, 2, 3)}
    number = leader.tell((0, 1, 2, 3), own)
    assert number == 1
    for rank in (1, 2, 3):
        message = sent.messages[rank]
        assert message.header == {"do": Do.SCORE, "mine": rank, "at": 7, "number": 1}
        assert message.arrays[0].tolist() == [rank, rank]


def test_one_message_is_for_all() -> None:
    sent = Sent()
    announcer(sent).tell((2, 0, 1), Message({"do": Do.SPANS, "zero": 0.5}))
    assert sorted(sent.messages) == [1, 2]
    assert all(message.header["zero"] == 0.5 for message in sent.messages.values())
