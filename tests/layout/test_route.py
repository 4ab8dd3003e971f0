"""Senders, rounds and the judge itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.errors import LayoutError, RunError
from plait.layout.atoms import MoveClass, demand
from plait.layout.boxes import Box, Holding, Slice, boxes_of_range
from plait.layout.decoder import decoder_parameters
from plait.layout.holdings import Holdings, packed, weights
from plait.layout.mesh import Cluster, Layout
from plait.layout.move import plan_move
from plait.layout.move_cost import Bandwidths, cost
from plait.layout.move_plan import MoveKind, MovePlan
from plait.layout.params import Param
from plait.layout.route import split
from tests.layout.judge import judge
from tests.layout.played_moves import allocate, execute

ONE = (Param("w", (240,)),)


def string(cluster_ranks: dict[int, tuple[int, int]], buffer: str) -> Holdings:
    """Ranges of one parameter of 240 elements."""
    boxes = {rank: [(0, Box(0, 1, 0, 1, start, stop))] for rank, (start, stop) in cluster_ranks.items()}
    return packed(ONE, "float32", boxes, buffer)


def test_a_broadcast_costs_its_source_one_copy() -> None:
    """One rank of a node has 960 bytes, three want them: it sends each byte once, and they exchange the rest."""
    plan, _ = judge(
        string({0: (0, 240)}, "a"), string(dict.fromkeys((1, 2, 3), (0, 240)), "b"), Cluster(1, 4), chunk_bytes=8
    )
    assert [plan.traffic.sent_bytes(rank) for rank in range(4)] == [960, 640, 640, 640]


def test_a_broadcast_over_nodes() -> None:
    """Three nodes of two: 960 bytes enter each of the other two once, half of them forwarded from one to the other,
    and spread inside."""
    target = string(dict.fromkeys((2, 3, 4, 5), (0, 240)), "b")
    plan, _ = judge(string({0: (0, 240)}, "a"), target, Cluster(3, 2), chunk_bytes=8)
    assert plan.traffic.node_bytes == {0: (960, 0), 1: (480, 960), 2: (480, 960)}
    assert [plan.traffic.received_bytes(rank) for rank in range(6)] == [0, 0, 960, 960, 960, 960]
    near = sum(size for (a, b), size in plan.traffic.link_bytes.items() if a // 2 == b // 2)
    assert near == 2 * 960


def test_whoever_can_serve_less_is_spared_nothing() -> None:
    """Rank 0 alone holds the first third; rank 1 also holds the rest and takes as much of it as evens the two."""
    source = string({0: (0, 240), 1: (80, 240)}, "a")
    plan, _ = judge(source, string({2: (0, 240)}, "b"), Cluster(1, 3), chunk_bytes=4)
    assert [plan.traffic.sent_bytes(rank) for rank in range(2)] == pytest.approx([480, 480], abs=30)


def test_a_node_that_has_it_serves_itself() -> None:
    source = string({0: (0, 240), 2: (0, 240)}, "a")
    plan, _ = judge(source, string({1: (0, 240), 3: (0, 240)}, "b"), Cluster(2, 2))
    assert plan.traffic.link_bytes == {(0, 1): 960, (2, 3): 960}
    assert plan.traffic.node_bytes == {}


def test_messages_fill_buckets_and_keep_pieces_whole() -> None:
    param_box = Box(0, 10, 0, 4, 0, 1)
    chunks = split(MoveClass((0,), (1,), [(0, param_box)]), 4, bucket_bytes=48, chunk_bytes=1 << 20)
    assert [chunk.num_elements for chunk in chunks] == [8, 12, 8, 12]
    assert all(len(chunk.pieces) == 1 for chunk in chunks), "cuts are between rows"
    wide = Box(0, 1, 0, 1, 0, 30)
    chunks = split(MoveClass((0,), (1,), [(0, wide), (1, wide)]), 4, bucket_bytes=1 << 20, chunk_bytes=80)
    assert [chunk.num_elements for chunk in chunks] == [20, 20, 20]
    assert [len(chunk.pieces) for chunk in chunks] == [1, 2, 1]


@pytest.mark.parametrize("box", [Box(0, 3, 2, 6, 1, 6), Box(0, 1, 0, 7, 2, 3), Box(1, 2, 0, 1, 0, 9)])
def test_a_range_of_a_box_is_at_most_five_boxes(box: Box) -> None:
    whole = Holding(0, box, "b", 0, (box.shape[1] * box.shape[2], box.shape[2], 1))
    for low in range(box.num_elements):
        for high in range(low + 1, box.num_elements + 1):
            boxes = boxes_of_range(box, low, high)
            visited = [at for part in boxes for start, stop in whole.at(part).ranges() for at in range(start, stop)]
            assert visited == list(range(low, high))
            assert len(boxes) <= 5


def test_byte_places_of_a_strided_slice() -> None:
    piece = Slice("b", 5, (2, 3), (10, 1))
    assert list(piece.ranges()) == [(5, 8), (15, 18)]
    assert list(Slice("b", 0, (2, 2), (1, 10)).ranges()) == [(0, 1), (10, 11), (1, 2), (11, 12)]


def test_elements_that_nobody_holds_are_refused() -> None:
    with pytest.raises(LayoutError, match="source: expected every element of w that rank 1 needs to be held"):
        demand(string({0: (0, 100)}, "a"), string({1: (90, 110)}, "b"))


def test_one_buffer_cannot_be_two() -> None:
    with pytest.raises(AssertionError, match="buffer a of rank 0 has 256 elements in the source, 128 in the target"):
        plan_move(string({0: (0, 240)}, "a"), string({0: (0, 120)}, "a"), Cluster(1, 1))


SMALL = decoder_parameters(layers=2, hidden=6, intermediate=8, heads=4, kv_heads=2, head_dim=2, vocabulary=17)


def exchange() -> tuple[Holdings, Holdings, MovePlan]:
    source = weights(SMALL, Layout.on(range(4), tp=4), "float32", "a")
    target = weights(SMALL, Layout.on(range(4), pp=2, tp=2), "float32", "b")
    return source, target, plan_move(source, target, Cluster(1, 4), chunk_bytes=64)


def test_the_judge_sees_a_deadlock() -> None:
    source, target, plan = exchange()
    row = list(plan.rows[0])
    first, second = [i for i, action in enumerate(row) if action.peer >= 0][:2]
    assert row[first].peer != row[second].peer or row[first].kind != row[second].kind
    row[first], row[second] = row[second], row[first]
    with pytest.raises(RunError, match="found a deadlock: rank 0 at "):
        execute(replace(plan, rows={**plan.rows, 0: tuple(row)}), allocate(source, target))


def test_the_judge_sees_a_missing_message() -> None:
    source, target, plan = exchange()
    last = max(i for i, action in enumerate(plan.rows[1]) if action.peer >= 0)
    row = plan.rows[1][:last] + plan.rows[1][last + 1 :]
    with pytest.raises(RunError, match="deadlock"):
        execute(replace(plan, rows={**plan.rows, 1: row}), allocate(source, target))


def test_cost_by_hand() -> None:
    """960 bytes to each of two ranks of another node, one message each, over 96 B/s shared: 1 + 10 seconds for the one
    that crosses, then 0.5 + 1 inside the node."""
    target = string(dict.fromkeys((2, 3), (0, 240)), "b")
    plan = plan_move(string({0: (0, 240)}, "a"), target, Cluster(2, 2))
    speeds = Bandwidths(near=960, far=96, copy=1e9, near_latency=0.5, far_latency=1.0)
    assert plan.traffic.num_messages == 2
    assert cost(plan.traffic, speeds).seconds == pytest.approx(12.5)
    assert cost(plan.traffic, speeds).bound == pytest.approx(11.0)


def test_ranks_that_share_a_network_interface_wait_for_it() -> None:
    source, target = string({0: (0, 120), 1: (120, 240)}, "a"), string({2: (0, 120), 3: (120, 240)}, "b")
    plan = plan_move(source, target, Cluster(2, 2))
    alone = Bandwidths(near=960, far=48, copy=1e9, far_latency=0.0, shared=False)
    assert cost(plan.traffic, alone).seconds == pytest.approx(10.0)
    assert cost(plan.traffic, replace(alone, shared=True)).seconds == pytest.approx(20.0)
    copied = plan_move(source, string({0: (0, 120)}, "c"), Cluster(2, 2))
    assert {action.kind for _, action in copied} == {MoveKind.COPY}
    assert cost(copied.traffic, replace(alone, copy=48.0)).seconds == pytest.approx(10.0)
