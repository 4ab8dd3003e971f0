"""The leader's end of a node, with an agent that is a thread of this process and answers what it is told to."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.errors import RunError
from plait.launch.failures import NodeLost
from plait.launch.node import Order
from plait.launch.nodes import messages
from plait.launch.nodes.echoes import ECHOES
from plait.launch.nodes.introduction import worker_key
from plait.launch.nodes.link import NodeLink
from plait.launch.nodes.relay import Cut, Relay
from plait.launch.wire import Channel
from plait.launch.worker_context import Place

KEY = bytes(range(32))
LIMIT_S = 30.0
STATUS = Path("/there/status")
AHEAD_S = 5000.0
CLOCK = object()
"""In place of an answer: what a clock says that is so far ahead of this process's."""


class Agent:
    """Answers each question by `answers`, and says what it is told to say."""

    def __init__(self, end: socket.socket) -> None:
        self.relay = Relay(Channel(end, KEY, controller=False))
        self.answers: dict[type, Any] = {
            messages.Launch: messages.Launched((501, 502), str(STATUS)),
            messages.Echo: CLOCK,
        }
        self.heard: list[object] = []
        self.leaves = False
        self.thread = threading.Thread(target=self.follow, daemon=True)
        self.thread.start()

    def follow(self) -> None:
        try:
            while not self.leaves:
                for message in self.relay.turn(0.05):
                    self.heard.append(message)
                    if isinstance(message, messages.Instruction):
                        answer = self.answers.get(type(message.what), ())
                        answer = messages.Clock(time.perf_counter() + AHEAD_S) if answer is CLOCK else answer
                        self.relay.send(messages.Answered(message.number, answer))
        except Cut:
            pass
        self.relay.close()

    def asked(self, kind: type) -> list[Any]:
        return [one.what for one in self.heard if isinstance(one, messages.Instruction) and isinstance(one.what, kind)]


def until(there: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not there():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.002)


def order(status: Path | None = None, group: int = 4) -> Order:
    return Order(group, (2, 3), 1, 4, {"A": "b"}, Path("/out"), status, 128)


@pytest.fixture
def joined() -> Iterator[Callable[..., tuple[NodeLink, Agent]]]:
    """Makes a node of number 1 with two CUDA devices, and its agent; both are gone after."""
    made: list[tuple[NodeLink, Agent]] = []

    def make(own_devices: bool = False, **given: Any) -> tuple[NodeLink, Agent]:
        ours, theirs = socket.socketpair()
        who = messages.Joined(1, 1, "host-b", 77, "10.0.0.2", 2, own_devices, 8, 1000, ())
        agent = Agent(theirs)
        made.append((NodeLink(Channel(ours, KEY, controller=True), KEY, who, LIMIT_S, **given), agent))
        return made[-1]

    yield make
    for link, agent in made:
        agent.leaves = True
        agent.thread.join(LIMIT_S)
        until(lambda link=link: link.gone)


@pytest.mark.parametrize(("own_devices", "devices"), [(False, (1, 2)), (True, (0, 1))])
def test_ranks_are_placed_behind_those_of_other_commands_on_the_machine(joined, own_devices, devices) -> None:
    link, agent = joined(own_devices)
    began = link.begin(order())
    assert agent.asked(messages.Launch)[0].ranks == (2, 3)
    assert (agent.asked(messages.Launch)[0].environment, agent.asked(messages.Launch)[0].output_dir) == (
        (("A", "b"),),
        "/out",
    )
    assert [process.pid for process in began.processes] == [501, 502]
    assert began.key == worker_key(KEY, 4)
    ahead_s = began.places[0].ahead_s
    assert ahead_s == pytest.approx(AHEAD_S, abs=1.0)
    assert began.places == [
        Place(1, "host-b", devices[0], "10.0.0.2", STATUS, ahead_s),
        Place(1, "host-b", devices[1], "10.0.0.2", STATUS, ahead_s),
    ]
    for process in began.processes:
        process.link.close()


def test_a_node_that_cannot_start_its_ranks_is_named_with_why(joined) -> None:
    link, agent = joined()
    agent.answers[messages.Launch] = ("has no folder /out",)
    with pytest.raises(RunError, match=r"^node 1 \(host-b\) has no folder /out$"):
        link.begin(order())


def test_a_file_is_written_or_it_is_said_why_not(joined) -> None:
    link, agent = joined()
    assert link.touch(Path("/there/file"), "text") == ""
    agent.answers[messages.Touch] = ("no such folder",)
    assert link.touch(Path("/there/file"), "text") == "no such folder"
    assert agent.asked(messages.Touch) == [messages.Touch("/there/file", "text")] * 2


def test_its_speed_is_that_of_the_shortest_of_a_few_messages(joined) -> None:
    link, agent = joined()
    reach = link.measure()
    assert reach is not None
    assert reach.bytes_per_s > 0
    assert reach.latency_s > 0
    assert len(agent.asked(messages.Echo)) == 2 * ECHOES


def test_only_ranks_of_the_present_group_exit_and_write_their_lines(joined, tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_bytes(b"." * 12)
    link, agent = joined()
    began = link.begin(order(status))
    first, second = began.processes
    for said in (
        messages.Exited(3, 2),
        messages.Lines(3, 0, b"old"),
        messages.Lines(4, 8, b"new"),
        messages.Exited(4, 3),
    ):
        agent.relay.send(said)
    until(lambda: second.exited)
    assert not first.exited
    assert status.read_bytes() == b"........new."
    assert second.wait(time.monotonic() + LIMIT_S)
    assert not first.wait(time.monotonic() + 0.01)
    for process in began.processes:
        process.link.close()


def test_what_is_asked_of_a_rank_is_asked_of_its_agent(joined) -> None:
    link, agent = joined()
    first, second = link.begin(order()).processes
    agent.answers[messages.Question] = ("was killed", "by SIGKILL")
    assert second.cause_of_death() == ("was killed", "by SIGKILL")
    assert first.output() == ("was killed", "/out/rank2.log")
    first.dump_stack(stopped=True)
    assert agent.asked(messages.Question) == [
        messages.Question(3, messages.About.DEATH),
        messages.Question(2, messages.About.OUTPUT),
        messages.Question(2, messages.About.STACK_OF_STOPPED),
    ]
    first.kill()
    first.kill()
    second.kill()
    assert len(agent.asked(messages.Kill)) == 1, "the agent kills all ranks of its node at once"
    assert first.state() == "", "nothing is asked of who was killed"


def test_a_node_that_leaves_says_why_and_its_ranks_are_lost_with_it(joined) -> None:
    link, agent = joined(explain=lambda: "its job was ended")
    process, other = link.begin(order()).processes
    agent.relay.send(messages.Alive(950))
    agent.relay.send(messages.Leaving("it was told to"))
    until(lambda: link.gone)
    assert link.gone == (
        "it was told to; its memory was 95% full at the last report (0.00 GiB of 0.00 GiB); its job was ended"
    )
    assert (process.exited, link.doubtful) == (True, True)
    assert process.cause_of_death() == (f"is lost with its node: {link.gone}", "")
    assert link.ask(messages.Kill(), LIMIT_S) is None
    with pytest.raises(NodeLost, match=r"node 1 \(host-b\) is lost: it was told to"):
        link.begin(order(group=5))
    process.link.close()
    other.link.close()


def test_a_connection_that_ends_is_a_node_that_is_lost(joined) -> None:
    link, agent = joined()
    agent.leaves = True
    until(lambda: link.gone)
    assert link.gone == "its connection was closed (its process or its machine has ended)"


def test_a_wish_of_the_node_is_passed_on(joined) -> None:
    wishes: list[int] = []
    link, agent = joined()
    link.on_wish(lambda: wishes.append(1))
    agent.relay.send(messages.Wish())
    until(lambda: wishes)


def test_a_wish_that_nobody_hears_yet_is_kept_for_who_asks_next(joined) -> None:
    wishes: list[int] = []
    link, agent = joined()
    agent.relay.send(messages.Wish())
    link.ask(messages.Echo(b""), LIMIT_S)  # behind the wish
    link.on_wish(lambda: wishes.append(1))
    assert wishes == [1]
    link.on_wish(lambda: wishes.append(2))
    assert wishes == [1], "it was heard"
    link.on_wish(None)
    agent.relay.send(messages.Wish())
    link.ask(messages.Echo(b""), LIMIT_S)
    link.on_wish(lambda: wishes.append(3))
    assert wishes == [1, 3]


def test_a_loss_is_told_at_once_where_no_ranks_run(joined) -> None:
    """Of ranks that run the loss is the error."""
    for runs in (False, True):
        said: list[str] = []
        link, agent = joined()
        link.on_loss = said.append
        if runs:
            link.begin(order())
        agent.relay.send(messages.Leaving("it was interrupted twice"))
        until(lambda link=link: link.gone)
        link.end(0, "")  # and its thread is gone
        assert said == ([] if runs else ["node 1 (host-b) is lost: it was interrupted twice"])
