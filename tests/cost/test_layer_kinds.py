"""Layers of one model that are unlike: dense blocks beside mixtures of experts, windows beside attention over all. By
hand, with the shape and machine of `test_model_costs`, and cuts into stages against all cuts."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cost.decoding import decode_steps
from plait.cost.generation_memory import kv_bytes_per_token, packed_stages, state_bytes
from plait.cost.graph_memory import graph_bytes
from plait.cost.layer_kinds import LayerKind, layer_kinds, stage_counts
from plait.cost.layer_times import LayerTimes, Micro, total
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.model_costs import ModelCosts
from plait.cost.model_work import ModelWork
from plait.cost.passes import Passes
from plait.cost.shape_parameters import adapter_parameters, parameters_of_shape
from plait.layout.mesh import Layout, Mesh, Parallelism
from plait.layout.shards import layer_sizes
from plait.models.lora_settings import NO_LORA, LoraSettings
from plait.models.mixer_shape import MixerShape
from plait.models.shape import ModelShape
from plait.planner.plan_problem import PlanProblem, RoleFacts
from plait.planner.plan_space import PlanSpace
from plait.simulator.step_graph import Rollouts, StepGraph
from tests.cost.test_forward_memory import BETWEEN, KEPT, SCORES, WITHIN
from tests.cost.test_forward_memory import WORK as LARGER
from tests.cost.test_model_costs import HEAD, LAYER, LENGTHS, SHAPE, WORK, a_cluster, a_flow

EXPERTS = {"experts": 8, "experts_per_token": 2, "expert_intermediate": 128, "shared_intermediate": 16}
MIXED = replace(SHAPE, **EXPERTS, expert_layers=2, mixtures=(2, 3))
"""Two dense layers, and two mixtures whose experts are as wide as the dense MLP."""
ATTENTION, EXPERT, BESIDE = 4 * 64 * 64, 3 * 64 * 128, 64 * (3 * 16 + 8)
"""Weights of a mixture: projections, one expert, and what all tokens pass: the shared expert and the router."""
TWO = Layout.on(range(2), pp=2)
MIXER = MixerShape(5000, channels=24, taps=4, heads=2, key_heads=2, key_dim=8, value_dim=4)
RECURRENT = replace(SHAPE, recurrent=(0, 1, 3), mixer=MIXER)
"""Three recurrent layers, and one that attends."""


def passes(shape: ModelShape, layout: Layout = TWO) -> Passes:
    return Passes(LayerTimes(a_cluster(4), ModelWork(shape, "bfloat16", 1000), layout))


def costs_of(shape: ModelShape, work=WORK) -> ModelCosts:
    return ModelCosts(work, dict.fromkeys(a_flow().roles, shape), a_flow(), a_cluster(4))


def test_kinds_of_layers() -> None:
    dense, mixture = (replace(SHAPE, **EXPERTS, expert_layers=count) for count in (0, 4))
    assert layer_kinds(MIXED) == (LayerKind(dense, (0, 1)), LayerKind(mixture, (2, 3)))
    assert stage_counts(MIXED, Parallelism(pp=2, stages=(3, 1))) == ((2, 1), (0, 1))
    near, far = (replace(SHAPE, windows=window) for window in ((5,) * 4, ()))
    assert layer_kinds(replace(SHAPE, windows=(5, 0, 5, 5))) == (LayerKind(near, (0, 2, 3)), LayerKind(far, (1,)))
    for alike in (SHAPE, near, mixture, replace(MIXED, mixtures=())):
        assert layer_kinds(alike) == (LayerKind(alike, (0, 1, 2, 3)),)


def test_each_stage_takes_what_its_own_layers_take() -> None:
    """96 tokens reach all eight experts: the products of two take longer than reading all."""
    per_token = ATTENTION + BESIDE + 2 * EXPERT
    found = [passes(MIXED).forward(Micro(96, 0, 96), stage) for stage in (0, 1)]
    assert found[0]["products"] == pytest.approx(2 * 2 * 96 * LAYER / 0.5e9)
    assert found[1]["products"] == pytest.approx(2 * 2 * 96 * per_token / 0.5e9)
    assert found[1]["head"] == pytest.approx(2 * 96 * HEAD / 0.5e9)
    cut = Layout(Mesh((0, 1)), Parallelism(pp=2, stages=(3, 1)))
    backward = passes(MIXED, cut).backward(Micro(96, 0, 96), 0)
    assert backward["products"] == pytest.approx(2 * 2 * 96 * (2 * LAYER + per_token) / 0.5e9)


def test_the_loss_of_routers_is_summed_over_the_tokens_of_each_sample() -> None:
    """Of 5 samples, in each of the two mixtures of the second stage: two products of [5, 96] and [96, 8] in a forward,
    one in a backward. What is computed again does not sum up anew. From stage to stage go sums [2, 5, 8] in float32."""
    both = passes(MIXED)
    for backward, products in ((False, 2), (True, 1)):
        make = both.backward if backward else both.forward
        plain, balanced = (make(Micro(96, 0, 96, balanced=count), 1) for count in (0, 5))
        expected = 2 * products * 2 * 5 * 96 * 8 / 0.5e9
        assert balanced == pytest.approx({**plain, "router balance": expected})
        assert make(Micro(96, 0, 96, balanced=5), 0).get("router balance", 0) == 0, "dense layers"
    plain, balanced = (
        both.training(Micro(96, 0, 96, balanced=count), 1, recompute=True, schedule="1F1B") for count in (0, 5)
    )
    assert balanced.get("recomputing") == plain.get("recomputing")
    assert balanced["hops"] - plain["hops"] == pytest.approx(2 * 2 * 5 * 8 * 4 / 0.5e8)


def test_a_recipes_coefficient_has_routers_summed_up() -> None:
    """Of the actor, in training: 8 samples in one micro-batch of 96 tokens."""
    plain, balanced = (costs_of(MIXED, replace(WORK, balanced=roles)) for roles in (frozenset(), frozenset({"actor"})))
    one = Layout.on(range(1))
    terms = balanced.call("actor.train", "train", one).terms
    assert terms["router balance"] == pytest.approx(2 * 3 * 2 * 8 * 96 * 8 / 0.5e9)
    for call, mode in (("critic.train", "train"), ("actor.generate", "decode"), ("ref.logprobs", "score")):
        assert balanced.call(call, mode, one) == plain.call(call, mode, one)


def test_tokens_that_are_decoded_read_the_experts_that_they_reach() -> None:
    """Of three rows, which reach six experts, with the way that counts many steps at once as with the terms."""
    mixture = 2 * (ATTENTION + BESIDE + 6 * EXPERT) / 0.5e8
    stages = passes(MIXED).decode_stages(3, 0)
    assert [total(stage) for stage in stages] == pytest.approx([2 * 2 * LAYER / 0.5e8, 2 * mixture])
    whole = passes(MIXED, Layout.on(range(1)))
    [both] = whole.decode_stages(3, 0)
    [steps] = decode_steps(whole, np.array([3.0]), np.array([0.0]), np.array([1.0]))
    assert steps == pytest.approx(total(both) + whole.times.head(3)) == pytest.approx(total(both) + 2 * HEAD / 0.5e8)


def test_windows_are_read_and_computed_as_far_as_they_reach() -> None:
    """Four rows of 25 tokens see 20 tokens together within a window of 5; the pool keeps all of them."""
    plain, windowed = passes(SHAPE), passes(replace(SHAPE, windows=(5, 5, 0, 0)))
    assert windowed.decode_stages(4, 100) == [plain.decode_stages(4, seen)[n] for n, seen in enumerate((20, 100))]
    assert windowed.decode_stages(4, 12) == plain.decode_stages(4, 12)
    steps = [np.array([4.0]), np.array([100.0]), np.array([1.0])]
    hops = 2 * plain.times.traffic.hop(4 * 64 * 2)
    expected = sum(map(total, windowed.decode_stages(4, 100))) + plain.times.head(4) + hops
    assert decode_steps(windowed, *steps) == pytest.approx(expected)
    far, near = (costs_of(one.times.work.shape).call("actor.generate", "decode", TWO) for one in (plain, windowed))
    assert near.seconds < far.seconds
    assert near.working_bytes == far.working_bytes


def test_pairs_within_a_window() -> None:
    """Of eight tokens that see three at most, the first sees one and the second two; all eight of a response see three.
    Rows of 16 tokens are within a window of 16."""
    assert LENGTHS.near_pairs((3, 0, 3, 16), 4, 8, 4) == ((3, 4 * (1 + 2 + 6 * 3) + 8 * 8 * 3),)
    assert LENGTHS.near_pairs((16,), 1, 1, 1) == LENGTHS.near_pairs((8,), 1, 0, 1) == ()
    whole = LENGTHS.pairs(4, 8, 4)
    assert whole == 4 * 36 + 8 * (8 * 8 + 36)
    rooted = SampleLengths(Lengths.fixed(8, root=5), Lengths.fixed(8))
    assert rooted.pairs(4, 8, 1) == whole - 3 * 15, "the root's own pairs once, not four times"
    assert rooted.near_pairs((3,), 4, 8, 1) == ((3, 276 - 3 * (1 + 2 + 3 * 3)),)
    assert rooted.pairs(4, 8, 9) == whole, "never more often than there are prompts"
    assert Micro(96, whole, 64, ((3, 276),)).seen(3) == 276
    assert (Micro(96, whole, 64, ((3, 276),)) / 2).seen(3) == 138
    assert Micro(96, whole, 64).seen(16) == Micro(96, whole, 64).seen(0) == whole
    found = [costs_of(replace(SHAPE, windows=windows)).call("ref.logprobs", "score", TWO) for windows in ((), (3,) * 4)]
    assert found[1].terms["attention"] == pytest.approx(found[0].terms["attention"] * 276 / whole)


def test_windows_that_no_sample_reaches_change_no_digit() -> None:
    far = costs_of(replace(SHAPE, windows=(16,) * 4))
    for call in (("actor.generate", "decode"), ("ref.logprobs", "score"), ("actor.train", "train")):
        assert far.call(*call, TWO) == costs_of(SHAPE).call(*call, TWO)


def test_each_stage_holds_its_own_layers() -> None:
    """Weights in bfloat16 beside the embedding, the head and the last norm; activations of a token are those of the
    272 inner elements that it passes in a mixture, in place of 128, and what enters and leaves each of two experts."""
    dense, mixture = LAYER + 2 * 64, ATTENTION + 64 * 8 + 8 * EXPERT + 2 * 64
    assert layer_sizes(parameters_of_shape(MIXED)) == pytest.approx(
        [2 * count / (dense + mixture) for count in (dense, dense, mixture, mixture)]
    )
    costs = costs_of(MIXED, LARGER)
    held = costs.held_bytes("ref", TWO, trained=False)
    assert held == (2 * (2 * dense + HEAD), 2 * (2 * mixture + 64 + HEAD))
    trained = costs.call("actor.train", "train", TWO).activation_bytes
    of_mixture = WITHIN + 2 * 4 * (272 - 128) + 2 * 2 * 2 * 64
    first, last = (24 * (BETWEEN + within) + SCORES for within in (WITHIN, of_mixture))
    assert trained == (2 * 2 * first, 2 * last + KEPT)


def test_of_layers_that_are_computed_again_the_widest_counts() -> None:
    """Beside the inputs of all: three layers and two micro-batches in flight in the first stage, one of each in the
    last, both with a mixture."""
    costs = costs_of(MIXED, replace(LARGER, checkpoint_activations=True))
    cut = Layout(Mesh((0, 1)), Parallelism(pp=2, stages=(3, 1)))
    of_mixture = WITHIN + 2 * 4 * (272 - 128) + 2 * 2 * 2 * 64
    mixture, inputs = 24 * (BETWEEN + of_mixture) + SCORES, 24 * 64 * 2
    trained = costs.call("actor.train", "train", cut).activation_bytes
    assert trained == (2 * 3 * inputs + mixture, inputs + mixture)
    shape = replace(SHAPE, windows=(5, 0, 5, 5))
    again = costs_of(shape, replace(LARGER, checkpoint_activations=True)).call("actor.train", "train", cut)
    assert again.activation_bytes[1] == inputs + 24 * (BETWEEN + WITHIN) + SCORES


def all_cuts(layers: int, stages: int):
    for ends in combinations(range(1, layers), stages - 1):
        yield tuple(stop - start for start, stop in pairwise((0, *ends, layers)))


@settings(deadline=None, max_examples=10)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from([0, 3])), min_size=4, max_size=8), st.sampled_from([2, 4]))
def test_no_cut_has_a_faster_slowest_stage(layers, stages) -> None:
    """Of a model with hardly a head, trained in so many stages."""
    mixtures = tuple(number for number, (is_mixture, _) in enumerate(layers) if is_mixture)
    alike = len(mixtures) in (0, len(layers))
    shape = replace(
        SHAPE,
        **EXPERTS,
        layers=len(layers),
        vocabulary=1,
        expert_layers=len(mixtures),
        mixtures=() if alike else mixtures,
        windows=tuple(window for _, window in layers),
    )
    costs, ranks = costs_of(shape), tuple(range(stages))
    sizes = layer_sizes(parameters_of_shape(shape)) if len(layer_kinds(shape)) > 1 else ()
    facts = RoleFacts((1.0,) * len(layers), last=shape.head_in_layers(1), layer_sizes=sizes)
    graph = StepGraph.of(a_flow(), a_flow().roles, [], rollouts=Rollouts(4, 24, 1000))
    problem = PlanProblem(graph, costs, dict.fromkeys(a_flow().roles, facts), stage_works=costs.stage_works)
    slot = next(n for n, slot in enumerate(graph.slots) if (slot.role, slot.mode) == ("actor", "train"))

    def slowest_s(cut: tuple[int, ...]) -> float:
        layout = Layout(Mesh(ranks), Parallelism(1, 1, stages, cut))
        return max(map(sum, costs.stage_seconds("actor.train", layout, 4)))

    [found, *_] = (s for s in PlanSpace(problem).forms.parallelisms(slot, ranks) if s.pp == stages)
    assert slowest_s(found.stages) == pytest.approx(min(map(slowest_s, all_cuts(len(layers), stages))), rel=1e-3)


def test_layers_that_keep_a_state_are_a_kind() -> None:
    keeps, attends = layer_kinds(RECURRENT)
    assert (keeps.layers, attends.layers) == ((0, 1, 3), (2,))
    assert (keeps.shape.attending, attends.shape.attending) == (0, 4)
    assert attends.shape == replace(SHAPE, mixer=MIXER)
    work = ModelWork(keeps.shape, "bfloat16", 1000)
    mlp = 3 * 64 * 128
    assert work.dense == 5000 + mlp
    # Within a chunk of 64 tokens as attention does, and with the state of a head.
    assert work.products(1) == 2 * (5000 + mlp + 2 * (64 * (3 * 8 + 2 * 4) + 3 * 8 * 4))
    assert (work.attention(7), work.kept(7, 1)) == (0, 0)


def test_layers_that_attend_and_keep_a_state() -> None:
    """As those of Falcon-H1: one kind, with both."""
    shape = replace(SHAPE, recurrent=(0, 1, 2, 3), attends=(0, 1, 2, 3), mixer=MIXER)
    assert layer_kinds(shape) == (LayerKind(shape, (0, 1, 2, 3)),)
    assert ModelWork(shape, "bfloat16", 1000).dense == ATTENTION + 5000 + 3 * 64 * 128
    assert kv_bytes_per_token(shape, "bfloat16") == kv_bytes_per_token(SHAPE, "bfloat16")
    assert state_bytes(shape, "bfloat16", 10, Parallelism()) == (4 * (2 * 24 * 4 + 4 * 2 * 8 * 4) * 15,)


def test_layers_that_are_an_mlp_alone() -> None:
    """As those of Nemotron-H: a mixer, an MLP of two matrices, a mixture of such, and attention."""
    layers = {"recurrent": (0,), "attends": (3,), "without_mlp": (0, 3), "expert_layers": 1, "mixtures": (2,)}
    shape = replace(SHAPE, **EXPERTS, **layers, mixer=MIXER, mlp_matrices=2)
    mixer, mlp, mixture, attention = (ModelWork(kind.shape, "bfloat16", 1000) for kind in layer_kinds(shape))
    assert [work.dense for work in (mixer, mlp, attention)] == [5000, 2 * 64 * 128, ATTENTION]
    assert (mixture.dense, mixture.expert) == (64 * (2 * 16 + 8), 2 * 64 * 128)
    assert [work.expert for work in (mixer, mlp, attention)] == [0] * 3
    assert [work.kept(1, 1) > 0 for work in (mixer, mlp, mixture, attention)] == [False, False, False, True]
    assert (shape.dense_layers, shape.attending, shape.attending_in(0, 3)) == (1, 1, 0)
    stages = [packed_stages(shape, "float32", NO_LORA, Parallelism(pp=pp)) for pp in (1, 2, 4)]
    assert len({sum(stage) for stage in stages}) == 1, "each layer's weights are on one stage"
    whole = replace(shape, mixer=replace(MIXER, key_heads=1, chunk=16))
    shares = [ModelWork(kind.shape, "bfloat16", 1000).share(2) for kind in layer_kinds(whole)]
    assert shares == [1, 1 / 2, 1 / 2, 1 / 2], "the mixer has one group"


def test_adapters_of_a_mixer_that_stays_whole() -> None:
    """A and B of both projections on each rank, of which two have half of those of two groups."""
    linear = ("in_proj", 64, 40), ("out_proj", 16, 64)
    lora = LoraSettings(rank=2, target_modules=["in_proj", "out_proj"])
    for groups, part in ((1, 0), (2, (40 + 16) // 2)):
        shape = replace(RECURRENT, mixer=replace(MIXER, key_heads=groups, chunk=16, linear=linear))
        whole = 3 * 2 * (64 + 40 + 16 + 64)
        assert [adapter_parameters(shape, lora, tp) for tp in (1, 2)] == [whole, whole - 3 * 2 * part]


def test_ranks_divide_layers_that_keep_a_state_between_key_heads() -> None:
    """Of three key heads a rank of two has two, and half of the MLP."""
    keeps, _ = layer_kinds(replace(RECURRENT, mixer=replace(MIXER, heads=3, key_heads=3)))
    work, mlp = ModelWork(keeps.shape, "bfloat16", 1000), 3 * 64 * 128
    mixer = 5000 + keeps.shape.mixer.scanned
    assert work.share(2) == pytest.approx((mixer * 2 / 3 + mlp / 2) / (mixer + mlp))
    assert ModelWork(layer_kinds(RECURRENT)[0].shape, "bfloat16", 1000).share(2) == 1 / 2
    unknown = replace(RECURRENT, mixer=MixerShape(5000))
    assert ModelWork(layer_kinds(unknown)[0].shape, "bfloat16", 1000).share(2) == (5000 + mlp / 2) / (5000 + mlp)


def test_a_step_of_decoding_reads_and_writes_states() -> None:
    """Six times those of each sample, half of them on each of two ranks; the numbers for many at once are the same."""
    of_sample = 2 * 24 * 4 + 4 * 2 * 8 * 4
    for tp in (1, 2):
        alike = passes(RECURRENT, Layout.on(range(tp), tp=tp))
        keeps, attends = alike.kinds(0)
        assert keeps.work.states(100.0, tp) == 600 * of_sample / tp
        assert attends.work.states(100.0, tp) == 0
        read_s = (keeps.work.read(9000) / tp + 6 * 9000 * of_sample / tp) / keeps.bytes_per_s
        assert total(keeps.decode_layer(9000, 0)) >= read_s
        one, many = total(keeps.decode_layer(9000, 0)), decode_steps(alike, *map(np.array, ([9e3], [0.0], [1.0])))
        others = total(attends.decode_layer(9000, 0)) + alike.of_stage(-1).drawing(9000)
        assert many[0] == pytest.approx(3 * one + others)


def test_bytes_of_states_and_of_keys_and_values() -> None:
    """A state of float32 for each head, and four columns of the convolution; slots are half as many again."""
    assert kv_bytes_per_token(RECURRENT, "bfloat16") == kv_bytes_per_token(SHAPE, "bfloat16") / 4
    of_layer = (2 * 24 * 4 + 4 * 2 * 8 * 4) * 15
    assert state_bytes(RECURRENT, "bfloat16", 10, Parallelism()) == (3 * of_layer,)
    assert state_bytes(RECURRENT, "bfloat16", 10, Parallelism(pp=2, stages=(3, 1))) == (2 * of_layer, of_layer)
    assert state_bytes(RECURRENT, "bfloat16", 10, Parallelism(tp=2)) == (3 * of_layer // 2,)
    assert state_bytes(SHAPE, "bfloat16", 10, Parallelism(pp=2)) == (0, 0)
    stages = [packed_stages(RECURRENT, "float32", NO_LORA, Parallelism(pp=pp)) for pp in (1, 2, 4)]
    assert len({sum(stage) for stage in stages}) == 1, "each layer's weights are on one stage"
    assert graph_bytes(RECURRENT, "bfloat16", 10, (64, 256)) == 0 < graph_bytes(SHAPE, "bfloat16", 10, (64, 256))
