"""Senders, rounds and the judge itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import LayoutError, RunError
from plait.layout.atoms import MoveClass, demand
from plait.layout.boxes import Box, Holding, Slice, boxes_of_range
from plait.layout.decoder import decoder_parameters
from plait.layout.holdings import Holdings, packed, weights
from plait.layout.mesh import Cluster, Layout
from plait.layout.move import plan_move
from plait.layout.move_cost import Bandwidths, cost
from plait.layout.move_plan import MoveKind, MovePlan, Traffic
from plait.layout.params import Param
from plait.layout.route import SWEEPS, Chunk, routes, split
from tests.layout.judge import judge
from tests.layout.played_moves import allocate, execute, played_seconds

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


def test_what_each_rank_sends_is_added_up_once_for_all() -> None:
    """So that asking for every one of many ranks does not go through all links each time."""
    links = {(0, 1): 5, (0, 2): 3, (2, 1): 2}
    seen = []

    class Counted(dict[tuple[int, int], int]):
        def items(self):
            seen.append(self)
            return super().items()

    traffic = Traffic(Cluster(1, 4), (), {})
    vars(traffic)["link_bytes"] = Counted(links)
    assert [traffic.sent_bytes(rank) for rank in range(4)] == [8, 0, 2, 0]
    assert [traffic.received_bytes(rank) for rank in range(4)] == [0, 7, 3, 0]
    assert len(seen) == 1


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
    assert played_seconds(plan, speeds) == pytest.approx(12.5)
    assert cost(plan.traffic, speeds).bound == pytest.approx(11.0)


def test_ranks_that_share_a_network_interface_wait_for_it() -> None:
    source, target = string({0: (0, 120), 1: (120, 240)}, "a"), string({2: (0, 120), 3: (120, 240)}, "b")
    plan = plan_move(source, target, Cluster(2, 2))
    alone = Bandwidths(near=960, far=48, copy=1e9, far_latency=0.0, shared=False)
    assert played_seconds(plan, alone) == pytest.approx(10.0)
    assert played_seconds(plan, replace(alone, shared=True)) == pytest.approx(20.0)
    copied = plan_move(source, string({0: (0, 120)}, "c"), Cluster(2, 2))
    assert {action.kind for _, action in copied} == {MoveKind.COPY}
    assert played_seconds(copied, replace(alone, copy=48.0)) == pytest.approx(10.0)


def plain_routes(chunks: list[Chunk], cluster: Cluster) -> list[list[tuple[int, int]]]:
    """`routes`, where each sender is sought among all that could send."""
    node_out, far_out, far_in, near_out = (defaultdict[int, int](int) for _ in range(4))
    chosen: list[list[tuple[int, int]]] = [[] for _ in chunks]

    def count(sender: int, receiver: int, size: int) -> None:
        if cluster.node_of(sender) == cluster.node_of(receiver):
            near_out[sender] += size
        else:
            node_out[cluster.node_of(sender)] += size
            far_out[sender] += size
            far_in[receiver] += size

    def choose(chunk: Chunk, *, forward: bool) -> Iterator[tuple[int, int]]:
        hops = dict.fromkeys(chunk.holders, 0)
        mine: dict[int, list[int]] = {}
        for rank in chunk.needers:
            mine.setdefault(cluster.node_of(rank), []).append(rank)
        far = [node for node in mine if node not in {cluster.node_of(rank) for rank in chunk.holders}]
        sends, inside = list(chunk.holders), list(chunk.holders)
        for node in sorted(far, key=lambda node: (node_out[node], node)):
            entry = min(mine[node], key=lambda rank: (far_in[rank], near_out[rank], rank))
            nodes = {n: [rank for rank in sends if cluster.node_of(rank) == n] for n in map(cluster.node_of, sends)}
            origin = min(nodes, key=lambda n: (node_out[n], min(hops[rank] for rank in nodes[n]), n))
            sender = min(nodes[origin], key=lambda rank: (far_out[rank], near_out[rank], hops[rank], rank))
            hops[entry] = hops[sender] + 1
            yield sender, entry
            mine[node].remove(entry)
            inside.append(entry)
            if forward and not cluster.is_store(entry):
                sends.append(entry)
        for node, ranks in mine.items():
            have = [rank for rank in inside if cluster.node_of(rank) == node]
            for rank in sorted(ranks, key=lambda rank: (near_out[rank], rank)):
                sender = min(have, key=lambda rank: (near_out[rank], hops[rank], rank))
                hops[rank] = hops[sender] + 1
                yield sender, rank
                have += [rank] if forward else []

    order = sorted(range(len(chunks)), key=lambda i: (len(chunks[i].holders), -chunks[i].num_elements, i))
    for sweep in range(SWEEPS):
        for i in order:
            for edge in chosen[i]:
                count(*edge, -chunks[i].num_elements)
            chosen[i] = []
            for edge in choose(chunks[i], forward=sweep > 0):
                count(*edge, chunks[i].num_elements)
                chosen[i].append(edge)
    return chosen


@given(st.randoms(use_true_random=False), st.integers(1, 5), st.sampled_from([1, 2, 4]), st.integers(0, 2))
def test_senders_are_those_that_have_least_to_do(draw: Random, nodes: int, devices: int, num_stores: int) -> None:
    cluster = Cluster(nodes, devices)
    ranks = range(cluster.num_devices + num_stores)
    chunks: list[Chunk] = []
    for _ in range(draw.randint(1, 8)):
        holders = sorted(draw.sample(ranks, draw.randint(1, max(1, len(ranks) // 2))))
        needers = [rank for rank in ranks if rank not in holders and draw.random() < 0.6]
        chunks += [Chunk(tuple(holders), tuple(needers), (), draw.randint(1, 20))] * draw.randint(1, 4)
    found = [list(map(tuple, edges.tolist())) for edges in routes(chunks, cluster)]
    assert found == plain_routes(chunks, cluster)
