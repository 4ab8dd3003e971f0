"""Two layouts in one memory: every block in the other's stays a view, and moves touch nothing of it."""

from __future__ import annotations

from hypothesis import given, settings

from plait.layout.decoder import decoder_parameters
from plait.layout.holdings import Holdings, merged, weights, zero_shards
from plait.layout.mesh import Cluster, Layout
from plait.layout.move_plan import MoveKind
from plait.layout.nesting import nested
from plait.layout.regroup import regrouped
from plait.layout.simulate import allocate, view
from tests.layout.cases import pairs
from tests.layout.judge import judge, places

SMALL = decoder_parameters(
    layers=2, hidden=6, intermediate=8, heads=4, kv_heads=4, head_dim=2, vocabulary=16, cut_vocabulary=True
)


@settings(max_examples=60, deadline=None)
@given(pairs())
def test_moves_inside_one_memory(case) -> None:
    parameters, cluster, before, after = case
    source, target = nested(weights(parameters, before, "float32"), weights(parameters, after, "float32"), "both")
    plan, _ = judge(source, target, cluster, chunk_bytes=64)
    apart = weights(parameters, before, "float32").num_bytes, weights(parameters, after, "float32").num_bytes
    for rank in {*source.ranks, *target.ranks}:
        together = max(source.num_bytes(rank), target.num_bytes(rank))
        assert max(apart[0](rank), apart[1](rank)) <= together <= apart[0](rank) + apart[1](rank)
    if before.mesh == after.mesh and before.parallelism == after.parallelism:
        assert {action.kind for _, action in plan} == {MoveKind.VIEW}


def kinds(source: Holdings, target: Holdings) -> set[MoveKind]:
    plan, _ = judge(source, target, Cluster(1, 4))
    return {action.kind for _, action in plan}


def test_the_larger_block_hosts_the_smaller_in_either_direction() -> None:
    """tp 4 to tp 2 receives into the blocks that hold its own; tp 2 to tp 4 moves nothing at all."""
    narrow = weights(SMALL, Layout.on(range(4), tp=4), "float32")
    wide = weights(SMALL, regrouped(Layout.on(range(4), dp=2, tp=2), SMALL, narrow, Cluster(1, 4)), "float32")
    training, generation = nested(narrow, wide, "weights")
    assert kinds(training, generation) == {MoveKind.VIEW, MoveKind.SEND, MoveKind.RECV}
    assert generation.num_bytes(0) == wide.num_bytes(0)
    assert kinds(*nested(wide, narrow, "weights")) == {MoveKind.VIEW}


def test_a_view_shares_its_memory() -> None:
    narrow = weights(SMALL, Layout.on(range(2), tp=2), "float32")
    training, generation = nested(narrow, weights(SMALL, Layout.on(range(2), dp=2), "float32"), "weights")
    memory = allocate(training, generation)
    for held in training.ranks[1]:
        view(memory[1]["weights"], places(held))[...] = 5
    (down,) = (h for h in generation.ranks[1] if "0.mlp.down_proj" in SMALL.params[h.param].name)
    whole = view(memory[1]["weights"], places(down))
    assert whole.sum() == 5 * 6 * 4
    assert (whole[:, 4:] == 5).all(), "a block cut along the last dim is a strided view"


def test_after_a_step_weights_go_straight_to_both_layouts() -> None:
    layout = Layout.on(range(4), dp=2, tp=2)
    masters = zero_shards(SMALL, layout, "float32")
    training, generation = nested(
        weights(SMALL, layout, "bfloat16"), weights(SMALL, Layout.on(range(4), dp=4), "bfloat16"), "weights"
    )
    plan, _ = judge(masters, merged([training, generation]), Cluster(1, 4))
    assert all(plan.copied_bytes(rank) <= masters.num_bytes(rank) // 2 for rank in range(4)), "only its own shard"
