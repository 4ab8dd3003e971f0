"""Terms of forwards and backwards by a device's numbers, computed by hand on the machine of `test_model_costs`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plait.cost.decoding import decode_steps
from plait.cost.hardware import Software
from plait.cost.layer_kinds import layer_kinds
from plait.cost.layer_times import LayerTimes, Micro, added, total
from plait.cost.model_flops import training_flops
from plait.cost.model_work import ModelWork
from plait.cost.passes import Passes
from plait.cost.profile import interpolated
from plait.cost.shape_parameters import adapter_parameters
from plait.layout.mesh import Layout, Mesh, Parallelism
from plait.layout.shards import balanced_stages
from plait.models.lora_settings import NO_LORA, LoraSettings
from plait.models.shape import ModelShape
from plait.planner.stage_layers import cut_layers
from tests.cost.test_layer_kinds import MIXED, MIXER, RECURRENT
from tests.cost.test_model_costs import HEAD, LAYER, SHAPE, SOFTWARE, WORK, a_cluster, check, costs_of
from tests.cost.test_profile import PROFILE

FORWARD = {"products": 2 * 96 * LAYER / 0.5e9, "attention": 4 * (4 * 36 + 8 * 100) * 64 / 0.5e9}
"""A layer over the 96 tokens of a step, which are more than reading its weights takes."""
ONE = Layout.on(range(1))
WINDOWED = replace(SHAPE, windows=(0, 2, 0, 0))
ADAPTER = 4 * (64 + 64) + 3 * (64 + 128)
"""Numbers of a layer's adapters of rank 1."""


def passes(layout: Layout, software: Software = SOFTWARE) -> Passes:
    return Passes(LayerTimes(a_cluster(4, software=software), ModelWork(SHAPE, "bfloat16", 1000), layout))


def test_search_run_and_cost_weigh_the_head_alike() -> None:
    """A head of 64,000 weights is worth 1.5625 layers of 40,960: beside it is one layer, and three are on the first
    stage. Without scores, 96 rows of which all pass the head take 3 layers and 1 + 1.5625; in equal stages the second
    takes 3.5625."""
    head = SHAPE.head_in_layers(1000)
    assert head == HEAD / LAYER == 1.5625
    assert cut_layers((1.0,) * 4, 2, last_s=head) == balanced_stages(4, 2, head) == (3, 1)
    layer_s, micro = 2 * 96 * LAYER / 0.5e9, Micro(96, 0, 96)
    for stages, expected in (((3, 1), [3, 1 + head]), ((2, 2), [2, 2 + head])):
        found = passes(Layout(Mesh((0, 1)), Parallelism(1, 1, 2, stages)))
        assert [total(found.forward(micro, stage)) for stage in (0, 1)] == pytest.approx(
            [n * layer_s for n in expected]
        )


def test_recomputing_is_a_forward_of_the_layers() -> None:
    plain, again = (
        costs_of(replace(WORK, checkpoint_activations=flag)).call("actor.train", "train", ONE) for flag in (False, True)
    )
    assert costs_of(WORK).flow.optimizer_steps("actor") == 1
    assert "recomputing" not in plain.terms
    assert again.terms == pytest.approx({**plain.terms, "recomputing": 4 * total(FORWARD)})


def test_parted_tokens_come_together_before_a_mixture_once_more() -> None:
    """96 tokens of 64 numbers of two bytes, of which each of two ranks has half: a gathering is half a sum, of which a
    layer has two. Dense layers have none beside these; of four layers here two are mixtures."""
    mixture = replace(SHAPE, experts=4, expert_layers=2, mixtures=(2, 3), expert_intermediate=64)
    over, micro = Layout.on(range(2), tp=2), Micro(96, 0, 0)
    for shape, of_all in ((SHAPE, 0.0), (mixture, 2 / 4)):
        found = Passes(LayerTimes(a_cluster(4, software=SOFTWARE), ModelWork(shape, "bfloat16", 1000), over))
        for way in (found.forward, found.backward):
            plain, parted = (
                way(replace(micro, sequence_parallel=parts), 0)["tensor parallel"] for parts in (False, True)
            )
            gather = found.times.traffic.gather("tp", 96 * 64 * 2)
            assert parted - plain == pytest.approx(of_all * 4 * gather)
        again = found.backward(replace(micro, sequence_parallel=True, gathered_again=True), 0)["tensor parallel"]
        assert again - plain == pytest.approx((of_all + 2) * 4 * gather), "and before attention and MLP"
        plain, parted = (found.received_bytes(replace(micro, sequence_parallel=parts)) for parts in (False, True))
        assert plain == 4 * 2 * 2 * 96 * 64 * 2
        assert parted - plain == of_all * 4 * 96 * 64 * 2
        again = found.received_bytes(replace(micro, sequence_parallel=True, gathered_again=True), backward=True)
        assert again - plain == (of_all + 2) * 4 * 96 * 64 * 2


BARE = replace(SHAPE, recurrent=(0, 1), attends=(3,), without_mlp=(0, 1, 3), mixer=MIXER)
"""Layers of one block each: two mixers, an MLP, an attention."""
DIVIDED = replace(RECURRENT, mixer=replace(MIXER, linear=(("in_proj", 64, 72), ("out_proj", 64, 64))))


READERS: dict[str, tuple[ModelShape, Any, int]] = {
    "all weights": (SHAPE, None, 4 + 4),
    "all layers": (SHAPE, "all-linear", 4 + 4),
    "attention": (SHAPE, ("q_proj", "v_proj"), 4),
    "last products": (SHAPE, ("o_proj", "down_proj"), 0),
    "MLP": (SHAPE, ("o_proj", "up_proj"), 4),
    "mixtures": (MIXED, None, 4 + 2 + 2),
    "beside mixtures": (MIXED, "all-linear", 4),
    "experts": (MIXED, ("experts.gate_up_proj", "experts.down_proj"), 0),
    "attention and experts": (MIXED, ("q_proj", "experts.gate_up_proj"), 4),
    "mixers": (RECURRENT, None, 4 + 4),
    "beside mixers": (RECURRENT, "all-linear", 1 + 4),
    "of mixers": (DIVIDED, "all-linear", 4 + 4),
    "last products of mixers": (DIVIDED, ("out_proj",), 0),
    "one block each": (BARE, None, 4),
}
"""What has adapters, None: nothing has any; and attentions, mixers and MLPs that are gathered for."""


@pytest.mark.parametrize(("shape", "targets", "blocks"), READERS.values(), ids=READERS)
def test_a_backward_gathers_again_what_trained_products_read(shape: ModelShape, targets: Any, blocks: int) -> None:
    """Under adapters routers are frozen, and of other products those without an adapter; experts with adapters keep the
    rows that they take (`tests.models.parallel.test_kept_tokens`)."""
    lora = NO_LORA if targets is None else LoraSettings(rank=2, target_modules=targets)
    times = LayerTimes(a_cluster(4), ModelWork(shape, "bfloat16", 1000, lora), Layout.on(range(2), tp=2))
    micro = Micro(96, 0, 0, sequence_parallel=True, gathered_again=True)
    forward, backward = (times.gatherings(micro, backward=flag) for flag in (False, True))
    assert 4 * (backward - forward) == blocks
    kinds = zip(times.by_kind(), layer_kinds(shape), strict=True)
    assert sum(len(kind.layers) * of.gatherings(micro, backward=True) for of, kind in kinds) == 4 * backward


def test_weights_under_an_adapter_get_no_gradients() -> None:
    """Products and head twice in place of three times; attention, which has no weights, three times. The optimizer
    passes the adapter's numbers alone: 12 bytes there and back, weights of two and gradients of four."""
    whole, adapted = (
        costs_of(replace(WORK, lora=LoraSettings(rank=rank))).call("actor.train", "train", ONE).terms for rank in (0, 2)
    )
    for name in ("products", "head"):
        assert adapted[name] == pytest.approx(2 / 3 * whole[name])
    assert adapted["attention"] == pytest.approx(whole["attention"]) == 4 * 3 * FORWARD["attention"]
    assert adapted["optimizer"] == pytest.approx((2 * 12 + 2 + 4) * 4 * 2 * ADAPTER / 0.5e8)
    assert "adapters" not in whole


def test_adapters_of_a_forward_and_a_backward() -> None:
    """Of 96 tokens: products of A and B; one pass over 512 inputs and six over 576 outputs. In the backward the
    products twice, four passes over outputs and five over inputs; attention once more. The reference has none."""
    costs = costs_of(replace(WORK, lora=LoraSettings(rank=2)))
    products = 2 * 96 * 2 * ADAPTER / 0.5e9
    forward = products + 96 * 2 * (6 * 576 + 512) / 0.5e8
    backward = 2 * products + 96 * 2 * (4 * 576 + 5 * 512) / 0.5e8
    assert costs.call("actor.train", "train", ONE).terms["adapters"] == pytest.approx(4 * (forward + backward))
    assert costs.call("actor.logprobs", "score", ONE).terms["adapters"] == pytest.approx(4 * forward)
    assert "adapters" not in costs.call("ref.logprobs", "score", ONE).terms
    goes_on = costs_of(replace(WORK, lora=LoraSettings(rank=2), frozen={"ref": LoraSettings(rank=2)}))
    assert goes_on.call("ref.logprobs", "score", ONE).terms["adapters"] == pytest.approx(4 * forward)
    (stage,) = costs.stage_seconds("actor.train", ONE, 1)
    (whole,) = costs_of(WORK).stage_seconds("actor.train", ONE, 1)
    assert stage[0] - whole[0] == pytest.approx(4 * forward)
    assert stage[1] - whole[0] == pytest.approx(4 * (backward + FORWARD["attention"]))


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("shape", [SHAPE, MIXED, WINDOWED, RECURRENT])
def test_seconds_and_operations_are_one_arithmetic(shape: ModelShape, rank: int) -> None:
    """What computes takes as long as a training's operations, of layers with windows and recurrences, too."""
    work, micro = ModelWork(shape, "bfloat16", 1000, LoraSettings(rank=rank)), Micro(96, 944, 96, ((2, 180),))
    found = Passes(LayerTimes(a_cluster(4, software=SOFTWARE), work, ONE))
    terms = added(found.forward(micro, 0), found.backward(micro, 0))
    adapters = 3 * 2 * 96 * adapter_parameters(shape, work.lora)
    computing_s = terms["products"] + terms["attention"] + terms["head"]
    assert computing_s == pytest.approx((training_flops(work, micro) - adapters) / 0.5e9)


def test_a_measured_backward_of_frozen_weights_lacks_one_product_with_each() -> None:
    """Of 20 tokens a forward takes 2 s and a backward 5; products with a layer's weights 2 * 20 * 40,960 operations, of
    which there are 1e6 in a second, or so few that no time is left but a forward's."""
    frozen = ModelWork(SHAPE, "bfloat16", 1000, LoraSettings(rank=2))
    for per_s, expected in ((1e6, 5 - 2 * 20 * LAYER / 1e6), (1e5, 2.0)):
        profile = PROFILE.model_copy(update={"shape": SHAPE, "dtype": "bfloat16", "products": ((20, per_s),)})
        terms = LayerTimes(profile.cluster(), frozen, ONE, profile).passed(Micro(20, 210, 0), backward=True)
        assert terms["layers"] == pytest.approx(expected)


def test_a_step_of_few_samples_reads_adapters() -> None:
    """One at a time and many at once say the same: reading A and B takes longer than computing with them."""
    adapted = Passes(LayerTimes(a_cluster(4), ModelWork(SHAPE, "bfloat16", 1000, LoraSettings(rank=2)), ONE))
    adapters = 2 * 2 * ADAPTER / 0.5e8 + 4 * 2 * (6 * 576 + 512) / 0.5e8
    layer = adapted.times.decode_layer(4, 1000)
    assert layer["adapters"] == pytest.approx(adapters)
    plain = total(passes(ONE).times.decode_layer(4, 1000))
    assert total(layer) == pytest.approx(plain + adapters)
    batch = np.array([4.0]), np.array([1000.0]), np.array([1.0])
    steps = [decode_steps(some, *batch).item() for some in (adapted, passes(ONE))]
    assert steps[0] - steps[1] == pytest.approx(4 * adapters)


def test_adapters_of_experts_are_read_as_far_as_tokens_reach_them() -> None:
    """Two of 16 experts for each token, of 32 to 64 in four layers: of three tokens six are read, of 100 all; forwards
    pass memory six times with what B gives and once with what A reads, of each pair. Ranks share what all have."""
    shape = replace(SHAPE, expert_layers=4, experts=16, experts_per_token=2, expert_intermediate=32)
    work = ModelWork(shape, "bfloat16", 1000, LoraSettings(rank=2, target_modules=("experts.down_proj",)))
    adapter, passing = 2 * (32 + 64), 6 * 64 + 32
    for tokens, reached in ((3.0, 6), (100.0, 16)):
        products_s = max(2 * tokens * 2 * adapter / 1e9, 2 * reached * adapter / 1e6)
        expected = products_s + 2 * tokens * 2 * passing / 1e6
        assert work.adapter_s(tokens, 1, 1e9, 1e6) == pytest.approx(expected)
    assert work.adapter_s(np.array([3.0, 100.0]), 1, 1e9, 1e6) == pytest.approx(
        [work.adapter_s(tokens, 1, 1e9, 1e6) for tokens in (3.0, 100.0)]
    )
    half, whole = (work.adapter_s(100.0, tp, 1e9, 1e6) for tp in (2, 1))
    assert whole / 2 < half < whole
    profile = PROFILE.model_copy(update={"shape": shape, "dtype": "bfloat16"})
    step = LayerTimes(profile.cluster(), work, ONE, profile).decode_layer(3, 10)
    assert step["adapters"] > 0, "a mixture has no compiled decoder"


def test_a_measured_decoder_computes_adapters_as_so_many_weights_more() -> None:
    """A of 32 columns for each of four products, B of all their outputs; a GPU computes them by plain layers."""
    packed = 32 * (64 + 3 * 64 + 64 + 64 + 64 + 2 * 128 + 128 + 64)
    work = ModelWork(SHAPE, "bfloat16", 1000, LoraSettings(rank=2))
    assert work.packed_adapter == packed
    for device in ("cpu", "cuda"):
        profile = PROFILE.model_copy(update={"shape": SHAPE, "dtype": "bfloat16", "device": device})
        measured = Passes(LayerTimes(profile.cluster(), work, ONE, profile))
        copying_s = 1 / profile.copy_bytes_per_s
        products = max(2 * 10 * 2 * ADAPTER / interpolated(profile.products, 10), 2 * 2 * ADAPTER * copying_s)
        plain = products + 10 * 2 * (6 * 576 + 512) * copying_s
        a_token = 2 * 2 * ADAPTER * copying_s + 2 * (6 * 576 + 512) * copying_s
        step, prompts = measured.times.decode_layer(1, 10), measured.prompts(Micro(10, 55, 0), 1, in_turn=True)
        if device == "cpu":
            assert step["adapters"] == pytest.approx(packed / LAYER * step["layers"])
            assert prompts["adapters"] == pytest.approx(packed / LAYER * prompts["layers"])
        else:
            assert step["adapters"] == pytest.approx(a_token)
            assert prompts["adapters"] == pytest.approx(4 * plain)


def test_ranks_that_replay_steps_divide_what_a_replayed_layer_takes() -> None:
    """A replay takes its launch and then reads weights: half as many by two ranks. What the same layer takes launched
    one operation after the other, much longer, counts for steps that no graph has."""
    reading = ModelWork(SHAPE, "bfloat16", 1).read(1) / PROFILE.copy_bytes_per_s
    steps = ((1, 10, 1.5 * reading), (256, 10, 2.5 * reading))
    launched = dict.fromkeys(("forward", "prompts"), ((1, 20 * reading), (1000, 20 * reading)))
    of_gpu = {"shape": SHAPE, "dtype": "bfloat16", "device": "cuda", "decode": steps, **launched}
    profile = PROFILE.model_copy(update=of_gpu)
    work = ModelWork(SHAPE, "bfloat16", 1000)

    def layer_s(rows: float, **sizes: int) -> float:
        times = LayerTimes(profile.cluster(2), work, Layout.on(range(2 if sizes else 1), **sizes), profile)
        return times.decode_layer(rows, 10 * rows)["layers"] / reading

    assert [layer_s(rows) for rows in (1, 256, 257)] == pytest.approx([1.5, 2.5, 20])
    assert [layer_s(rows, tp=2) for rows in (1, 256)] == pytest.approx([0.5 + 0.5, 0.5 + 1])
    assert layer_s(257, tp=2) > 19
    assert [layer_s(rows, pp=2) for rows in (1, 256, 257)] == pytest.approx([1.5, 2.5, 20])


def test_prompts_are_computed_once_for_all_their_samples() -> None:
    """Four prompts of eight tokens in one chunk: 32 tokens, 36 pairs each; the head, of four rows, reads weights."""
    found = costs_of(WORK).call("actor.generate", "prefill", ONE)
    layer = (2 * 32 * LAYER + 4 * 4 * 36 * 64) / 0.5e9
    check(found, {"prompts": 4 * layer + 2 * HEAD / 0.5e8})
    in_two = costs_of(replace(WORK, max_prefill_tokens=16)).call("actor.generate", "prefill", ONE)
    layer = max((2 * 16 * LAYER + 4 * 2 * 36 * 64) / 0.5e9, 2 * LAYER / 0.5e8)
    check(in_two, {"prompts": 2 * (4 * layer + 2 * HEAD / 0.5e8)})


def test_decoding_reads_keys_and_values_of_every_context() -> None:
    """Four samples with 1,000 tokens: the weights once, and of each token keys and values of four heads."""
    layer = passes(ONE).times.decode_layer(4, 1000)
    assert layer["products"] == pytest.approx(2 * 4 * LAYER / 0.5e9)
    assert layer["attention"] == pytest.approx(4 * 1000 * 64 / 0.5e9)
    assert total(layer) == pytest.approx((2 * LAYER + 2 * 1000 * 64 * 2) / 0.5e8)


def test_ranks_that_decode_divide_weights_and_heads_and_sum_twice() -> None:
    two = passes(Layout.on(range(2), tp=2))
    layer = (2 * LAYER + 2 * 1000 * 64 * 2) / 2 / 0.5e8 + 2 * (1e-4 + 4 * 64 * 2 / 0.5e8)
    assert total(two.times.decode_layer(4, 1000)) == pytest.approx(layer)
    at_once = decode_steps(two, np.array([4.0]), np.array([1000.0]), np.array([1.0]))
    assert at_once.tolist() == pytest.approx([4 * layer + 2 * HEAD / 2 / 0.5e8])


def test_a_token_hops_from_stage_to_stage() -> None:
    """Of one group: through both stages, and over a link and a hop's own time from each to the next."""
    software = replace(SOFTWARE, hop_s=0.25)
    two = passes(Layout.on(range(2), pp=2), software)
    layer = (2 * LAYER + 2 * 1000 * 64 * 2) / 0.5e8
    hops = 2 * (1e-4 + 4 * 64 * 2 / 0.5e8 + 0.25)
    found = decode_steps(two, np.array([4.0]), np.array([1000.0]), np.array([1.0]))
    assert found.tolist() == pytest.approx([4 * layer + 2 * HEAD / 0.5e8 + hops])


@pytest.mark.parametrize(("schedule", "waits"), [("", 1), ("gpipe", 1), ("one at a time", 3)])
def test_one_micro_batch_at_a_time_waits_for_every_one(schedule: str, waits: int) -> None:
    """Three micro-batches through two stages; the last is the slower, by its head, three forwards of 100 rows."""
    terms = passes(Layout.on(range(2), pp=2)).training(Micro(96, 944, 100), 3, recompute=False, schedule=schedule)
    stage = 2 * 3 * total(FORWARD)
    assert terms["head"] == pytest.approx(3 * 3 * 2 * 100 * HEAD / 0.5e9)
    assert terms["filling and draining"] == pytest.approx(waits * stage)
    assert terms["hops"] == pytest.approx(waits * 2 * (1e-4 + 96 * 64 * 2 / 0.5e8))
    assert total(terms) == pytest.approx((3 + waits) * stage + terms["head"] + terms["hops"])
