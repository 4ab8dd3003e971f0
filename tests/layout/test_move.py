"""Every plan, on random models, clusters and layouts up to 16 ranks; and the table of all legal pairs."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.layout import move
from plait.layout.decoder import decoder_parameters
from plait.layout.holdings import ITEM_BYTES, merged, weights, zero_shards
from plait.layout.mesh import Cluster, Layout, Mesh, Parallelism
from plait.layout.move import plan_move, traffic_of
from plait.layout.move_cost import Bandwidths, cost
from plait.layout.move_plan import MoveKind, MovePlan
from plait.layout.shards import check, check_instances
from tests.cases import examples, slow_but
from tests.layout.cases import pairs
from tests.layout.judge import judge, node_egress_bound, rank_egress_bound

SMALL_SIZES: dict[str, Any] = {
    "layers": 3,
    "hidden": 6,
    "intermediate": 10,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 2,
    "vocabulary": 29,
    "tied": True,
    "cut_vocabulary": True,
}
SMALL = decoder_parameters(**SMALL_SIZES)
DEEPER = decoder_parameters(
    layers=4, hidden=64, intermediate=176, heads=8, kv_heads=4, head_dim=8, vocabulary=321, cut_vocabulary=True
)


@settings(max_examples=examples(10, 100), deadline=None)
@given(pairs(), st.sampled_from((16, 256, 1 << 20)), st.sampled_from((1, 4096)))
def test_weights_between_any_two_layouts(case, bucket_bytes: int, chunk_bytes: int) -> None:
    parameters, cluster, before, after = case
    source = weights(parameters, before, "float32", "before")
    target = weights(parameters, after, "float32", "after")
    plan, _ = judge(source, target, cluster, bucket_bytes=bucket_bytes, chunk_bytes=chunk_bytes)
    assert plan == plan_move(source, target, cluster, bucket_bytes=bucket_bytes, chunk_bytes=chunk_bytes)


@settings(max_examples=examples(15, 100), deadline=None)
@given(pairs(), st.sampled_from((("float32", "bfloat16"), ("float64", "float64"), ("bfloat16", "float32"))))
def test_optimizer_state_to_weights(case, dtypes: tuple[str, str]) -> None:
    """ZeRO-1 shards of one layout become the weights of another, in the narrower dtype on the way."""
    parameters, cluster, before, after = case
    source = zero_shards(parameters, before, dtypes[0])
    plan, _ = judge(source, weights(parameters, after, dtypes[1]), cluster, bucket_bytes=1024, chunk_bytes=64)
    assert plan.item_bytes == min(ITEM_BYTES[dtype] for dtype in dtypes)


@settings(max_examples=examples(15, 40), deadline=None)
@given(pairs())
def test_optimizer_state_to_optimizer_state(case) -> None:
    """What a resume under another plan does with moments."""
    parameters, cluster, before, after = case
    source = zero_shards(parameters, before, "float32", "before")
    judge(source, zero_shards(parameters, after, "float32", "after"), cluster, chunk_bytes=1)


@settings(max_examples=examples(8, 40), deadline=None)
@given(pairs(), st.data())
def test_one_move_serves_training_and_generation(case, data) -> None:
    """A rank that needs an element twice receives it once and copies it."""
    parameters, cluster, before, after = case
    source = zero_shards(parameters, before, "float32")
    training = weights(parameters, before, "bfloat16", "training")
    generation = weights(parameters, after, "bfloat16", "generation")
    judge(source, merged([training, generation]), cluster, chunk_bytes=data.draw(st.sampled_from((1, 4096))))


def longest_message(plan: MovePlan) -> int:
    return max((action.num_elements * plan.item_bytes for _, action in plan if action.peer >= 0), default=0)


@settings(max_examples=examples(16, 80), deadline=None)
@given(pairs())
def test_nodes_send_equal_shares(case) -> None:
    """As equal as the holders allow, up to one message."""
    parameters, cluster, before, after = case
    source = weights(parameters, before, "float32", "before")
    target = weights(parameters, after, "float32", "after")
    plan = plan_move(source, target, cluster, chunk_bytes=1)
    most = max((out for out, _ in plan.traffic.node_bytes.values()), default=0)
    assert most <= node_egress_bound(source, target, cluster, 4) + longest_message(plan)


@settings(max_examples=examples(15, 60), deadline=None)
@given(pairs(st.just(Cluster(1, 8))))
def test_ranks_of_a_node_send_equal_shares(case) -> None:
    parameters, cluster, before, after = case
    source = zero_shards(parameters, before, "float32", "before")
    target = weights(parameters, after, "float32", "after")
    plan = plan_move(source, target, cluster, chunk_bytes=1)
    most = max(plan.traffic.sent_bytes(rank) for rank in range(8))
    assert most <= rank_egress_bound(source, target, 4) + longest_message(plan)


@pytest.mark.parametrize(("size", "num_legal"), slow_but([(1, 1), (2, 3), (4, 5)], [(1, 1), (2, 3), (4, 5), (8, 7)]))
def test_every_legal_pair_of_a_few_ranks(size: int, num_legal: int) -> None:
    cluster = Cluster(1, size)
    legal = []
    for sizes in Parallelism.all_of(size):
        layout = Layout(Mesh(tuple(range(size))), sizes)
        if sizes.pp <= SMALL.num_layers:
            check(SMALL, layout, cluster)
            legal.append(layout)
    for before, after in product(legal, legal):
        source = weights(SMALL, before, "float32", "before")
        judge(source, weights(SMALL, after, "float32", "after"), cluster, chunk_bytes=16)
    assert len(legal) == num_legal


def test_instances_of_different_sizes() -> None:
    """One of tp 2, one of two stages, one of a single rank, from training on all of them."""
    instances = [Layout.on((0, 1), tp=2), Layout.on((2, 3), pp=2), Layout.on((4,))]
    check_instances(SMALL, instances, Cluster(1, 5))
    target = merged([weights(SMALL, instance, "float32", "generation") for instance in instances])
    source = weights(SMALL, Layout.on(range(4), dp=2, tp=2), "float32", "training")
    plan, _ = judge(source, target, Cluster(1, 5))
    assert plan.traffic.received_bytes(4) == SMALL.num_elements * 4
    assert plan.traffic.received_bytes(0) == plan.traffic.received_bytes(1) == 0


def test_a_tied_embedding_reaches_both_of_its_stages() -> None:
    """Masters on the first stage only; the last receives what it needs of the embedding and nothing else."""
    layout = Layout.on(range(2), pp=2)
    plan, _ = judge(zero_shards(SMALL, layout, "float32"), weights(SMALL, layout, "float32"), Cluster(1, 2))
    assert plan.traffic.received_bytes(0) == 0
    assert plan.traffic.received_bytes(1) == SMALL.params[0].num_elements * 4


def test_offload_is_a_copy_on_the_spot() -> None:
    layout = Layout.on(range(4), dp=2, tp=2)
    device, host = (weights(SMALL, layout, "bfloat16", name) for name in ("device", "host"))
    for source, target in ((device, host), (host, device)):
        plan, _ = judge(source, target, Cluster(1, 4))
        assert {action.kind for _, action in plan} == {MoveKind.COPY}
        assert plan.traffic.total_bytes == 0


def test_no_copy_is_longer_than_a_bucket() -> None:
    """So that a rank may do something else in between, however large a parameter is."""
    device, host = (weights(SMALL, Layout.on(range(1)), "float32", name) for name in ("device", "host"))
    plan, _ = judge(device, host, Cluster(1, 1), bucket_bytes=64)
    assert max(action.num_elements for _, action in plan) == 16
    assert sum(action.num_elements for _, action in plan) == SMALL.num_elements


@pytest.mark.process
def test_every_process_computes_the_same_plan() -> None:
    """Hash seeds differ between processes; plans must not."""
    code = (
        "from hashlib import sha256; from plait.layout.decoder import decoder_parameters;"
        "from plait.layout.holdings import weights, zero_shards; from plait.layout.mesh import Cluster, Layout;"
        "from plait.layout.move import plan_move;"
        f"model = decoder_parameters(**{SMALL_SIZES});"
        "a, b = Layout.on(range(8), dp=2, tp=2, pp=2), Layout.on(range(2, 6), dp=2, tp=2);"
        "source, target = zero_shards(model, a, 'float32'), weights(model, b, 'bfloat16');"
        "plan = plan_move(source, target, Cluster(2, 4), chunk_bytes=8);"
        "print(sha256(repr(plan).encode()).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


@pytest.mark.parametrize(
    ("training", "generation"),
    [
        (Layout.on(range(4), dp=4), Layout.on(range(4), dp=4)),
        (Layout.on(range(4), dp=2, tp=2), Layout.on(range(4), dp=4)),
        (Layout.on(range(4), tp=4), Layout.on(range(4), dp=2, tp=2)),
        (Layout.on(range(4), dp=2, pp=2), Layout.on(range(4), dp=2, tp=2)),
        (Layout.on(range(2), dp=2), Layout.on(range(2, 6), dp=2, tp=2)),
        (Layout.on(range(4), dp=2, tp=2), Layout.on(range(2, 6), dp=4)),
    ],
    ids=str,
)
def test_two_hops_receive_what_one_would(training: Layout, generation: Layout) -> None:
    """New weights go from the masters to the training's layout, then on to others: as few bytes as at once. Per rank
    its share of the masters does not travel, all else of both of its blocks does, once."""
    cluster = Cluster(1, 6)
    masters = zero_shards(DEEPER, training, "float32")
    own, other = weights(DEEPER, training, "bfloat16", "own"), weights(DEEPER, generation, "bfloat16", "other")
    first, second = plan_move(masters, own, cluster).traffic, plan_move(own, other, cluster).traffic
    at_once = plan_move(masters, merged([own, other]), cluster).traffic
    for rank in range(6):
        assert first.received_bytes(rank) + second.received_bytes(rank) == at_once.received_bytes(rank)
    assert sum(map(at_once.received_bytes, range(6))) > 0


def test_what_a_move_carries_is_known_without_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes as long, to the bit, whichever link is looked at first: here the links of node 0 are the busiest."""
    cluster, speeds = Cluster(2, 4), Bandwidths(near=3e9, far=0.7e9, copy=1e9)
    source = weights(DEEPER, Layout.on(range(4), 1, 2, 2), "float32", "before")
    target = weights(DEEPER, Layout.on(range(8), 4, 2, 1), "float32", "after")
    monkeypatch.delattr(move, "rounds")
    found = traffic_of(source, target, cluster, chunk_bytes=64)
    assert found.num_messages > len(found.carried) > 8
    back = replace(found, carried=dict(reversed(found.carried.items())))
    assert cost(back, speeds) == cost(found, speeds)
    out, _ = found.node_bytes[0]
    far = sum(count for (sender, receiver), (count, _) in found.carried.items() if sender < 4 <= receiver)
    assert cost(found, speeds).bound == pytest.approx(far * speeds.far_latency + out / speeds.far)
