"""Executes a plan and holds it against what the masks of held and needed elements say, element by element."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, combinations

import numpy as np

from plait.layout.atoms import demand
from plait.layout.boxes import Holding, Slice
from plait.layout.holdings import Holdings
from plait.layout.mesh import Cluster
from plait.layout.move import plan_move, traffic_of
from plait.layout.move_plan import MoveKind, MovePlan
from tests.layout.played_moves import Memory, Traffic, allocate, execute, view


def values_of(held: Holdings) -> list[np.ndarray]:
    """A value for every logical element, exact in every dtype: small whole numbers, neighbours different."""
    found, start = [], 0
    for param in held.params:
        count = param.num_elements
        found.append((1 + (start + np.arange(count)) % 251).reshape(param.grid))
        start += count + 7
    return found


def places(held: Holding) -> Slice:
    return Slice(held.buffer, held.offset, held.box.shape, held.strides)


def cut(values: np.ndarray, box) -> np.ndarray:
    return values[box[0] : box[1], box[2] : box[3], box[4] : box[5]]


def fill(memory: Memory, held: Holdings) -> None:
    values = values_of(held)
    for rank, mine in held.ranks.items():
        for holding in mine:
            view(memory[rank][holding.buffer], places(holding))[...] = cut(values[holding.param], holding.box)


def check_values(memory: Memory, held: Holdings) -> None:
    values = values_of(held)
    for rank, mine in held.ranks.items():
        for holding in mine:
            found = view(memory[rank][holding.buffer], places(holding))
            assert (found == cut(values[holding.param], holding.box)).all(), (rank, holding)


def masks(held: Holdings, ranks) -> list[np.ndarray]:
    """Which elements of every parameter any of these ranks holds."""
    found = [np.zeros(param.grid, dtype=bool) for param in held.params]
    for rank in ranks:
        for holding in held.ranks.get(rank, ()):
            cut(found[holding.param], holding.box)[...] = True
    return found


def lacking(source: Holdings, target: Holdings, ranks) -> int:
    """Elements that these ranks together need and do not hold."""
    return sum(
        int((needed & ~have).sum()) for needed, have in zip(masks(target, ranks), masks(source, ranks), strict=True)
    )


def judge(source: Holdings, target: Holdings, cluster: Cluster, **options: int) -> tuple[MovePlan, Traffic]:
    """Plan, execute, and check everything that is promised of every plan."""
    plan = plan_move(source, target, cluster, **options)
    assert traffic_of(source, target, cluster, **options) == plan.traffic
    memory = allocate(source, target)
    fill(memory, source)
    traffic = execute(plan, memory)
    check_values(memory, target)
    check_values(memory, source)
    check_minimal(plan, traffic, source, target)
    check_order(plan)
    return plan, traffic


def check_minimal(plan: MovePlan, traffic: Traffic, source: Holdings, target: Holdings) -> None:
    ranks = sorted({*source.ranks, *target.ranks})
    for rank in ranks:
        need = lacking(source, target, [rank]) * plan.item_bytes
        assert plan.traffic.received_bytes(rank) == traffic.received[rank] == need, f"rank {rank}"
        assert plan.traffic.sent_bytes(rank) == traffic.sent[rank]
    nodes = defaultdict(list)
    for rank in ranks:
        nodes[plan.cluster.node_of(rank)].append(rank)
    for node, members in nodes.items():
        need = lacking(source, target, members) * plan.item_bytes
        assert plan.traffic.node_bytes.get(node, (0, 0))[1] == need, f"node {node}"
    assert sum(traffic.sent.values()) == sum(traffic.received.values()) == plan.traffic.total_bytes


def check_order(plan: MovePlan) -> None:
    """Two buckets, one message per round and direction, every rank in the order of all messages."""
    for rank, row in plan.rows.items():
        messages = [action for action in row if action.peer >= 0]
        buckets: dict[int, int] = defaultdict(int)
        for action in messages:
            buckets[action.round] += action.num_elements * plan.item_bytes
        assert max(buckets.values(), default=0) <= 2 * plan.bucket_bytes
        assert [x.seq for x in messages] == sorted({x.seq for x in messages})
        assert [x.round for x in messages] == sorted(x.round for x in messages)
        ends = [(x.round, x.kind in (MoveKind.SEND, MoveKind.WRITE)) for x in messages]
        assert len(set(ends)) == len(ends), f"rank {rank} has two messages of one direction in a round"
        assert all(x.num_elements * plan.item_bytes <= plan.bucket_bytes for x in messages)


def node_egress_bound(source: Holdings, target: Holdings, cluster: Cluster, item_bytes: int) -> float:
    """Bytes that some node has to send if only nodes that hold elements send them, however they share the work:
    the greatest, over sets of nodes, of what only the set can serve, per node of the set."""
    classes = []
    for each in demand(source, target).classes:
        holders = frozenset(map(cluster.node_of, each.holders))
        goals = {cluster.node_of(rank) for rank in each.needers} - holders
        classes.append((holders, each.num_elements * item_bytes * len(goals)))
    return _bound(classes)


def rank_egress_bound(source: Holdings, target: Holdings, item_bytes: int) -> float:
    """The same for the ranks of one node."""
    found = demand(source, target).classes
    return _bound([(frozenset(x.holders), x.num_elements * item_bytes * len(x.needers)) for x in found])


def _bound(classes) -> float:
    members = sorted(set(chain.from_iterable(holders for holders, _ in classes)))
    subsets = chain.from_iterable(combinations(members, size) for size in range(1, len(members) + 1))
    best = 0.0
    for subset in subsets:
        inside = set(subset)
        best = max(best, sum(size for holders, size in classes if holders <= inside) / len(subset))
    return best
