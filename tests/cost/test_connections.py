"""Communicators and messages of plans, counted by hand."""

from __future__ import annotations

import pytest

from plait.cost.connections import GROUP_BYTES, RECEIVER_BYTES, SENDER_BYTES, Connected, Connections, Placing, Sending
from plait.cost.device_memory import READING, memory_by_device
from plait.cost.working_memory import MESSAGES, process_terms
from plait.layout.groups import axes
from plait.layout.mesh import Cluster, Layout
from plait.layout.params import Heads
from tests.cost.test_device_memory import facts_of, named

MIB = 1 << 20
BOTH = SENDER_BYTES + RECEIVER_BYTES


def on(devices: int, nodes: int = 1) -> Connections:
    """Of a role with eight heads and two heads of keys."""
    return Connections(Cluster(nodes, devices), nodes * devices, {"actor": Heads(8, 2, shared=True)})


def test_bytes_of_a_group_and_of_a_message() -> None:
    """24 channels of 4 MiB of Simple, 4.6875 of LL128, 0.5 of LL; 8 channels, 10 MiB where messages come and 2 where
    they go."""
    assert (int(220.5 * MIB), 80 * MIB, 16 * MIB) == (GROUP_BYTES, RECEIVER_BYTES, SENDER_BYTES)


@pytest.mark.parametrize(
    ("sizes", "groups", "stages"),
    [
        ({"dp": 8}, [1] * 8, 0),  # those of dp are all ranks
        ({"tp": 8}, [1] * 8, 0),
        ({"dp": 4, "tp": 2}, [3] * 8, 0),  # all, dp, tp
        ({"dp": 2, "tp": 2, "pp": 2}, [5] * 8, 1),  # and two of the same two stages: for messages, and the ends
        ({"pp": 8}, [3, *[2] * 6, 3], 7),  # the ends are two of eight
    ],
    ids=str,
)
def test_groups_of_one_layout(sizes: dict[str, int], groups: list[int], stages: int) -> None:
    """Stages send each other messages in both directions; what the run's group of all ranks takes is not counted."""
    layout = Layout.on(range(8), **sizes)
    assert on(8).num_groups([Placing(layout)]).tolist() == groups
    found = on(8).group_bytes([Placing(layout)]).tolist()
    assert found == [count * GROUP_BYTES + stages * BOTH for count in groups]


def test_groups_that_several_layouts_share_are_counted_once() -> None:
    """Training in pairs of four copies, and an instance in each pair; then a rank alone, which has no group."""
    train, both = Layout.on(range(8), dp=4, tp=2), Layout.on(range(4), dp=4)
    placings = [Placing(train), Placing(train, apart=True), Placing(both, apart=True)]
    assert on(8).num_groups(placings).tolist() == [3] * 8
    assert on(8).num_groups([*placings, Placing(both)]).tolist() == [4] * 4 + [3] * 4
    alone = [Placing(instance) for instance in train.instances()]
    assert on(8).num_groups([*placings, *alone]).tolist() == [3] * 8, "instances one by one"


@pytest.mark.parametrize(("tp", "others"), [(2, 0), (4, 1), (8, 3)])
def test_ranks_that_share_a_head_of_keys_send_each_other_its_gradients(tp: int, others: int) -> None:
    layout = Layout.on(range(8), dp=8 // tp, tp=tp)
    plain, trained = (on(8).group_bytes([Placing(layout, trains=role)]) for role in ("", "actor"))
    assert (trained - plain).tolist() == [others * BOTH] * 8
    again = [Placing(layout), Placing(layout, trains="actor"), Placing(layout, trains="actor")]
    assert on(8).group_bytes(again).tolist() == trained.tolist()


def test_every_group_of_a_layout_has_a_place() -> None:
    layout = Layout.on((5, 3, 1, 0, 2, 4, 6, 7), dp=2, tp=2, pp=2)
    of_rank = lambda rank: {axis.group for axis in axes(layout) if rank in axis.ranks and len(axis.ranks) > 1}
    assert on(8).num_groups([Placing(layout)]).tolist() == [len(of_rank(rank)) for rank in range(8)]


def test_weights_go_one_way() -> None:
    """From two ranks to three, one of which sends as well. Those that receive hand on to each other what they have, and
    what comes from another machine."""
    connections = on(4)
    found = connections.message_bytes(Connected((), [Sending((0, 1), (1, 2, 3))]))
    assert found.tolist() == [3 * SENDER_BYTES, *[3 * RECEIVER_BYTES + 2 * SENDER_BYTES] * 3]
    twice = connections.message_bytes(Connected((), [Sending((0, 1), (1, 2, 3)), Sending((1,), (3,))]))
    assert twice.tolist() == found.tolist(), "one group, connected once"
    far = on(2, nodes=2).message_bytes(Connected((), [Sending((0,), (2, 3))]))
    assert far.tolist() == [0, 0, BOTH, BOTH], "the network is not counted"


def test_samples_go_between_instances() -> None:
    instances = Layout.on(range(6), dp=3, tp=2).instances()
    found = on(8).message_bytes(Connected((), (), [instances])).tolist()
    assert found == [4 * BOTH] * 6 + [0, 0], "to the four ranks of the two others, and from them"


@pytest.mark.parametrize(
    ("make_plan", "keys", "groups", "messages"),
    [
        (named("colocated", 8), {}, 1, 0),
        (named("colocated", 8), {"rebalance": "auto"}, 1, 7 * BOTH),
        (named("colocated", 8), {"reference": {"sync_every": 1}}, 1, 7 * BOTH),
        (named("split", 8), {}, 1, 4 * RECEIVER_BYTES + 3 * BOTH),
    ],
    ids=["moves nothing", "samples", "a reference that follows", "split"],
)
def test_a_plan_has_what_it_uses(make_plan, keys, groups: int, messages: int) -> None:
    """Of its first rank. In `split` it is one of four that generate: weights go there from four others, and from one to
    the other."""
    facts = facts_of(make_plan, "grpo", device="cuda", sampling={"kv_tokens": 1 << 15}, **keys)
    assert facts.connected[0] == (groups * GROUP_BYTES, messages)
    assert facts_of(make_plan, "grpo", **keys).connected == ((0, 0),) * 8, "gloo's are small"
    (device, *_) = memory_by_device(facts)
    rows, during = dict(device.rows), dict(device.during)
    assert rows.get(MESSAGES, 0) == messages
    held = [*process_terms("cuda", 8), *(what for what in rows if what.endswith(("(bfloat16)", "and gradients")))]
    assert during[READING] == sum(rows[what] for what in held), "messages come later"
