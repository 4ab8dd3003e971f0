"""Every plan, on random models, clusters and layouts up to 16 ranks; and the table of all legal pairs."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.layout.decoder import decoder_parameters
from plait.layout.holdings import ITEM_BYTES, merged, weights, zero_shards
from plait.layout.mesh import Cluster, Layout, Mesh, Parallelism
from plait.layout.move import plan_move
from plait.layout.move_plan import MovePlan
from plait.layout.shards import check
from tests.layout.cases import pairs
from tests.layout.judge import judge, node_egress_bound, rank_egress_bound

SMALL = decoder_parameters(
    layers=3, hidden=6, intermediate=10, heads=8, kv_heads=2, head_dim=2, vocabulary=29, tied=True, cut_vocabulary=True
)


@settings(max_examples=100, deadline=None)
@given(pairs(), st.sampled_from((16, 256, 1 << 20)), st.sampled_from((1, 4096)))
def test_weights_between_any_two_layouts(case, bucket_bytes: int, chunk_bytes: int) -> None:
    parameters, cluster, before, after = case
    source = weights(parameters, before, "float32", "before")
    target = weights(parameters, after, "float32", "after")
    judge(source, target, cluster, bucket_bytes=bucket_bytes, chunk_bytes=chunk_bytes)


@settings(max_examples=100, deadline=None)
@given(pairs(), st.sampled_from((("float32", "bfloat16"), ("float64", "float64"), ("bfloat16", "float32"))))
def test_optimizer_state_to_weights(case, dtypes: tuple[str, str]) -> None:
    """ZeRO-1 shards of one layout become the weights of another, in the narrower dtype on the way."""
    parameters, cluster, before, after = case
    source = zero_shards(parameters, before, dtypes[0])
    plan, _ = judge(source, weights(parameters, after, dtypes[1]), cluster, bucket_bytes=1024, chunk_bytes=64)
    assert plan.item_bytes == min(ITEM_BYTES[dtype] for dtype in dtypes)


@settings(max_examples=40, deadline=None)
@given(pairs())
def test_optimizer_state_to_optimizer_state(case) -> None:
    """What a resume under another plan does with moments."""
    parameters, cluster, before, after = case
    source = zero_shards(parameters, before, "float32", "before")
    judge(source, zero_shards(parameters, after, "float32", "after"), cluster, chunk_bytes=1)


@settings(max_examples=40, deadline=None)
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


@settings(max_examples=80, deadline=None)
@given(pairs())
def test_nodes_send_equal_shares(case) -> None:
    """As equal as the holders allow, up to one message."""
    parameters, cluster, before, after = case
    source = weights(parameters, before, "float32", "before")
    target = weights(parameters, after, "float32", "after")
    plan = plan_move(source, target, cluster, chunk_bytes=1)
    most = max((out for out, _ in plan.node_bytes.values()), default=0)
    assert most <= node_egress_bound(source, target, cluster, 4) + longest_message(plan)


@settings(max_examples=60, deadline=None)
@given(pairs(st.just(Cluster(1, 8))))
def test_ranks_of_a_node_send_equal_shares(case) -> None:
    parameters, cluster, before, after = case
    source = zero_shards(parameters, before, "float32", "before")
    target = weights(parameters, after, "float32", "after")
    plan = plan_move(source, target, cluster, chunk_bytes=1)
    most = max(plan.sent_bytes(rank) for rank in range(8))
    assert most <= rank_egress_bound(source, target, 4) + longest_message(plan)


def test_every_legal_pair_of_a_few_ranks() -> None:
    count = 0
    for size in (1, 2, 4, 8):
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
            count += 1
    assert count == 1 + 3**2 + 5**2 + 7**2
