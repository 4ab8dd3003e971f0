"""Connections of several ranks over one: what is said arrives whole, in order and at the right rank. Both ends here."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from plait.launch.nodes import relay
from plait.launch.nodes.messages import Alive, Note
from plait.launch.nodes.relay import Cut, Relay
from plait.launch.wire import Channel
from tests.hand_clock import HandClock

KEY = bytes(range(32))
TURNS = 2000
"""More than any of these takes."""


class Ends:
    """Two relays that are joined, each turned by hand, and what messages each has had."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.leader = Relay(Channel(ours, KEY, controller=True))
        self.agent = Relay(Channel(theirs, KEY, controller=False))
        self.at_leader: list[object] = []
        self.at_agent: list[object] = []

    def until(self, there: Callable[[], bool]) -> None:
        for _ in range(TURNS):
            if there():
                return
            self.at_leader += self.leader.turn(0.001)
            self.at_agent += self.agent.turn(0.001)
        pytest.fail("it does not come")

    def rank(self, number: int) -> tuple[socket.socket, socket.socket]:
        """A rank's connection: the leader's end and the worker's."""
        pairs = [socket.socketpair() for _ in range(2)]
        for end, (outer, inner) in zip((self.leader, self.agent), pairs, strict=True):
            end.attach(number, inner)
            outer.setblocking(False)
        return pairs[0][0], pairs[1][0]


@pytest.fixture
def ends() -> Iterator[Ends]:
    both = Ends()
    yield both
    both.leader.close()
    both.agent.close()


def heard(link: socket.socket, into: bytearray) -> int:
    """Take what is there; how much has come in all. -1 once the other side has closed."""
    try:
        data = link.recv(1 << 16)
    except BlockingIOError:
        return len(into)
    into += data
    return len(into) if data else -1


def test_messages_come_in_their_order_in_both_directions(ends: Ends) -> None:
    said = [Note(str(number)) for number in range(300)]
    for note in said:
        ends.leader.send(note)
    ends.agent.send(Alive(5))
    ends.until(lambda: len(ends.at_agent) == 300 and len(ends.at_leader) == 1)
    assert (ends.at_agent, ends.at_leader) == (said, [Alive(5)])


def test_each_rank_hears_what_is_said_to_it(ends: Ends) -> None:
    links = {rank: ends.rank(rank) for rank in (2, 3)}
    for rank, (leader, worker) in links.items():
        with leader, worker:
            leader.send(b"to %d" % rank)
            worker.send(b"from %d" % rank)
            down, up = bytearray(), bytearray()
            ends.until(lambda: min(heard(worker, down), heard(leader, up)) >= 4)  # noqa: B023
            assert (bytes(down), bytes(up)) == (b"to %d" % rank, b"from %d" % rank)


def test_more_than_the_connections_hold_arrives_whole_once_it_is_read(ends: Ends) -> None:
    leader, worker = ends.rank(0)
    sent, got = bytes(range(256)) * (3 << 12), bytearray()
    rest = memoryview(sent)

    def all_there() -> bool:
        nonlocal rest
        if rest:
            try:
                rest = rest[leader.send(rest[: 1 << 18]) :]
            except BlockingIOError:
                heard(worker, got)
        else:
            heard(worker, got)
        return len(got) == len(sent)

    with leader, worker:
        ends.until(all_there)
    assert bytes(got) == sent


def test_a_rank_whose_connection_ends_is_read_to_the_end_and_leaves_the_others(ends: Ends) -> None:
    (leader, worker), (other_leader, other_worker) = ends.rank(0), ends.rank(1)
    with leader, other_leader, other_worker:
        worker.send(b"last words")
        worker.close()
        got, other = bytearray(), bytearray()
        ends.until(lambda: heard(leader, got) == -1)
        assert bytes(got) == b"last words"
        other_worker.send(b"here")
        ends.until(lambda: heard(other_leader, other) == 4)


def test_an_end_that_is_lost_cuts_the_other(ends: Ends) -> None:
    ends.agent.send(Note("the last"))
    ends.until(lambda: bool(ends.at_leader))
    ends.agent.close()
    with pytest.raises(Cut, match="its connection was closed"):
        ends.until(lambda: False)


def test_a_message_of_another_key_cuts_the_connection() -> None:
    ours, theirs = socket.socketpair()
    leader = Relay(Channel(ours, KEY, controller=True))
    Channel(theirs, bytes(32), controller=False).put(Note("let me in"))
    with theirs, pytest.raises(Cut, match="its connection was broken"):
        leader.turn(1.0)
    leader.close()


def test_silence_is_counted_but_not_what_this_process_slept(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = HandClock.of(relay, monkeypatch)
    ends.leader.turn(0.0)
    first = ends.leader.silence_s
    hand.now_s += 0.25
    ends.leader.turn(0.0)
    assert ends.leader.silence_s == pytest.approx(first + 0.25)
    hand.now_s += 100.0
    ends.leader.turn(0.0)
    assert ends.leader.silence_s == pytest.approx(first + 0.75), "one turn counts half a second at most"
    ends.agent.send(Alive())
    assert ends.leader.turn(1.0) == [Alive()]
    assert ends.leader.silence_s == 0.0
