"""Two layouts in one memory: every block in the other's stays a view, and moves touch nothing of it."""

from __future__ import annotations

from hypothesis import given, settings

from plait.layout.decoder import decoder_parameters
from plait.layout.holdings import Holdings, merged, weights, zero_shards
from plait.layout.mesh import Cluster, Layout
from plait.layout.move_plan import MoveKind
from plait.layout.nesting import nest
from plait.layout.params import Param, Parameters
from plait.layout.regroup import regrouped
from tests.cases import examples
from tests.layout.cases import pairs
from tests.layout.judge import judge, places
from tests.layout.nests import nested, num_bytes
from tests.layout.played_moves import allocate, view

SMALL = decoder_parameters(
    layers=2, hidden=6, intermediate=8, heads=4, kv_heads=4, head_dim=2, vocabulary=16, cut_vocabulary=True
)


@settings(max_examples=examples(10, 60), deadline=None)
@given(pairs())
def test_moves_inside_one_memory(case) -> None:
    parameters, cluster, before, after = case
    apart = weights(parameters, before, "float32", "one"), weights(parameters, after, "float32", "other")
    source, target = nested(apart)
    plan, _ = judge(source, target, cluster, chunk_bytes=64)
    for rank in {*source.ranks, *target.ranks}:
        together = num_bytes(rank, source, target)
        sizes = [num_bytes(rank, held) for held in apart]
        assert max(sizes) <= together <= sum(sizes)
    if before.mesh == after.mesh and before.parallelism == after.parallelism:
        assert {action.kind for _, action in plan} == {MoveKind.VIEW}


def kinds(source: Holdings, target: Holdings) -> set[MoveKind]:
    plan, _ = judge(source, target, Cluster(1, 4))
    return {action.kind for _, action in plan}


def test_the_larger_block_hosts_the_smaller_in_either_direction() -> None:
    """tp 4 to tp 2 receives into the blocks that hold its own; tp 2 to tp 4 moves nothing at all."""
    narrow = weights(SMALL, Layout.on(range(4), tp=4), "float32", "narrow")
    regrouped_layout = regrouped(Layout.on(range(4), dp=2, tp=2), SMALL, narrow, Cluster(1, 4))
    wide = weights(SMALL, regrouped_layout, "float32", "wide")
    training, generation = nested([narrow, wide])
    assert kinds(training, generation) == {MoveKind.VIEW, MoveKind.SEND, MoveKind.RECV}
    assert num_bytes(0, training, generation) == num_bytes(0, wide)
    assert generation == wide, "what hosts others lies as it would alone"
    assert kinds(*nested([wide, narrow])) == {MoveKind.VIEW}


def test_a_view_shares_its_memory() -> None:
    narrow = weights(SMALL, Layout.on(range(2), tp=2), "float32", "narrow")
    training, generation = nested([narrow, weights(SMALL, Layout.on(range(2), dp=2), "float32", "wide")])
    memory = allocate(training, generation)
    for held in training.ranks[1]:
        view(memory[1][held.buffer], places(held))[...] = 5
    (down,) = (h for h in generation.ranks[1] if "0.mlp.down_proj" in SMALL.params[h.param].name)
    whole = view(memory[1]["wide"], places(down))
    assert whole.sum() == 5 * 6 * 4
    assert (whole[:, 4:] == 5).all(), "a block cut along the last dim is a strided view"


def test_after_a_step_weights_go_straight_to_both_layouts() -> None:
    layout = Layout.on(range(4), dp=2, tp=2)
    masters = zero_shards(SMALL, layout, "float32")
    training, generation = nested(
        [weights(SMALL, layout, "bfloat16", "narrow"), weights(SMALL, Layout.on(range(4), dp=4), "bfloat16", "wide")]
    )
    plan, _ = judge(masters, merged([training, generation]), Cluster(1, 4))
    copied = plan.traffic.copied
    assert all(copied.get(rank, 0) <= num_bytes(rank, masters) // 2 for rank in range(4)), "only its own shard"


def test_stages_host_halves_of_what_they_have() -> None:
    """pp 2 and tp 2 on two ranks: halves of the own stage's layers are views, those of the other's are stored."""
    stages = weights(SMALL, Layout.on(range(2), pp=2), "float32", "stages")
    halves = weights(SMALL, Layout.on(range(2), tp=2), "float32", "halves")
    training, generation = nested([stages, halves])
    assert training == stages
    cut = [held for held in generation.ranks[0] if SMALL.params[held.param].layer is not None]
    assert {(SMALL.params[held.param].layer, held.buffer) for held in cut} == {(0, "stages"), (1, "halves")}
    plan, _ = judge(training, generation, Cluster(1, 2))
    assert not any(plan.traffic.copied.values())


def test_three_parts_lie_in_the_largest() -> None:
    layouts = Layout.on(range(4), tp=4), Layout.on(range(4), dp=2, tp=2), Layout.on(range(4), dp=4)
    parts = nested([weights(SMALL, layout, "float32", f"tp{layout.parallelism.tp}") for layout in layouts])
    for rank in (0, 3):  # of the others the quarter is in the other half
        assert {held.buffer for part in parts for held in part.ranks[rank]} == {"tp1"}
    assert kinds(parts[0], merged(parts[1:])) == {MoveKind.VIEW, MoveKind.SEND, MoveKind.RECV}


def test_what_stays_one_buffer() -> None:
    """Parts that are told to, and parts of which others hold next to nothing: of a half and a quarter of the other half
    the norms alone are common."""
    model = Parameters((Param("q_proj.weight", (16, 8), 0, cut=0), Param("norm", (3,), 0)))
    quarters = weights(model, Layout.on(range(4), tp=4), "float32")
    half = weights(model, Layout.on(range(2), tp=2), "float32").ranks[0]
    parts = {"quarter": quarters.ranks[0], "half": half}
    nested_in = nest(parts, model.params)["quarter"]
    assert (nested_in.own, nested_in.lengths) == (0, {"half": 64 + 32})
    alone = nest(parts, model.params, whole=["quarter"])["quarter"]
    assert (alone.own, alone.lengths) == (64, {"quarter": 64})
    apart = nest({"quarter": quarters.ranks[3], "half": half}, model.params)["quarter"]
    assert (apart.own, apart.lengths) == (64, {"quarter": 64})


def test_experts_and_sections_are_views_only_as_a_whole() -> None:
    """Kernels take stacked matrices dense, and a range of each of two sections is no strided tensor."""
    params = (
        Param("in_proj_qkv.weight", (14, 2), 0, cut=0, widths=(2, 2, 3)),
        Param("experts.gate_up_proj", (4, 8, 6), 0, cut=1, sections=2),
        Param("experts.down_proj", (4, 6, 4), 0, cut=2),
        Param("o_proj.weight", (6, 4), 0, cut=1),
        Param("norm", (6,), 0),
    )
    model = Parameters(params)
    narrow = weights(model, Layout.on(range(2), tp=2), "float32", "narrow").ranks[0]
    wide = weights(model, Layout.on(range(2), dp=2), "float32", "wide").ranks[0]
    buffers = [held.buffer for held in nest({"narrow": narrow, "wide": wide}, params, whole=["wide"])["narrow"].held]
    assert buffers == [*["narrow"] * 3, "narrow", "narrow", "wide", "wide"]
    for part in (wide, narrow):
        both = nest({"one": part, "other": part}, params)
        assert {held.buffer for one in both.values() for held in one.held} == {"one"}
