"""What the leader and agents say to each other survives the connection, and names who speaks."""

from __future__ import annotations

import pickle

import pytest

from plait.launch.nodes.messages import LEADS_ALONE, About, Answered, Instruction, Joined, Launch, Launched, Question


def joined(node: int) -> Joined:
    return Joined(1, node, "host-a", 77, "10.0.0.2", 2, True, 8, 1 << 30, (("torch", "2.13"),))


def test_a_node_is_called_by_its_number_and_its_machine() -> None:
    assert joined(3).label == "node 3 (host-a)"
    assert joined(0).label == "node 0 (host-a)"
    assert joined(LEADS_ALONE).label == "the leader (host-a)"


@pytest.mark.parametrize(
    "message",
    [
        joined(2),
        Instruction(5, Launch(1, (2, 3), 4, (("KEY", "value"),), None, "/folder", 128)),
        Instruction(6, Question(3, About.STACK_OF_STOPPED)),
        Answered(5, Launched((101, 102), "/tmp/status")),
        Answered(6, ("", "no stack")),
    ],
    ids=lambda message: type(getattr(message, "what", getattr(message, "answer", message))).__name__,
)
def test_a_message_is_the_same_at_the_other_end(message: object) -> None:
    assert pickle.loads(pickle.dumps(message, protocol=5)) == message
