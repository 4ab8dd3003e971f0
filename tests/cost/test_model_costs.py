"""Seconds of calls, computed by hand on a machine of round numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from plait.cost.cluster import ClusterSpec
from plait.cost.costs import CallCost, Costs, Spread
from plait.cost.decoding import Decoding, Drafting, Pieces, profile
from plait.cost.drafts import NO_DRAFTS, TRUST, Drafts
from plait.cost.generation_bytes import held_by_graphs
from plait.cost.generation_memory import kv_bytes_per_token
from plait.cost.hardware import Device, Link, Software
from plait.cost.layer_times import LayerTimes, total
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.model_costs import ModelCosts
from plait.cost.model_work import ModelWork
from plait.cost.move_bound import BoundedMoves
from plait.cost.moves import move_cost
from plait.cost.passes import Passes
from plait.cost.shape_parameters import adapter_parameters, parameters_of_shape
from plait.cost.workload import Workload
from plait.dataflow import Dataflow, trace
from plait.layout.holdings import weights
from plait.layout.mesh import Layout, Mesh, Parallelism
from plait.layout.move import plan_move
from plait.layout.shards import held_elements, shard
from plait.models.files.known_shapes import KNOWN
from plait.models.lora_settings import LoraSettings
from plait.models.shape import ModelShape
from plait.policy.decode_ring import COSTS, num_groups
from plait.policy.packing import GroupTokens
from plait.recipes.algorithm import load_flow, trace_algorithm
from plait.recipes.role_models import MODEL_ROLES, REWARD_ROLES
from plait.speculation import acceptance

SHAPE = ModelShape(4, 64, 128, 4, 4, 16, 1000, False, 4096, 4 * 64 * 64)
LAYER = 4 * 64 * 64 + 3 * 64 * 128
"""Weights of its layers: projections, MLP."""
HEAD = 64 * 1000
DEVICE = Device("round", 1e9, 1 << 30, 1e8)
SOFTWARE = Software(products=0.5, memory=0.5, links=0.5, layer_s=0.0, hop_s=0.0)
LENGTHS = SampleLengths(Lengths.fixed(8), Lengths.fixed(8))


def a_cluster(devices: int = 4, nodes: int = 1, software: Software = SOFTWARE) -> ClusterSpec:
    links = Link(1e8, 1e-4), Link(1e7, 1e-3), Link(1e7, 0.0)
    return ClusterSpec(nodes, devices // nodes, DEVICE, *links, None, "round", software)


def a_flow(name: str = "ppo") -> Dataflow:
    return trace_algorithm(load_flow(name), {}, (*MODEL_ROLES, *REWARD_ROLES))


def costs_of(workload: Workload, cluster: ClusterSpec | None = None) -> ModelCosts:
    flow = a_flow()
    return ModelCosts(workload, dict.fromkeys(flow.roles, SHAPE), flow, cluster or a_cluster())


WORK = Workload(4, 2, LENGTHS, "bfloat16", micro_batch_tokens=1000)


def check(found: CallCost, expected: dict[str, float]) -> None:
    kept = {name: seconds for name, seconds in found.terms.items() if seconds}
    assert kept == pytest.approx(expected)
    assert found.seconds == pytest.approx(sum(expected.values()))


TAKEN: dict[str, dict[str, Any]] = {
    "on CPUs": {"packed": True},
    "on GPUs": {"device": "cuda", "checkpoint_activations": True, "most_new_tokens": 4},
    "pools that stay": {"device": "cuda", "pools_stay": True},
    "another engine": {"device": "cuda", "elsewhere": True},
    "adapters": {"lora": LoraSettings(rank=3), "sequence_parallel": True},
    "a draft model": {"drafts": Drafts(2.0, 3.0, 2.0), "draft_model": SHAPE, "max_running": 1},
    "few at a time": {"kv_tokens": 40, "stated_groups": 2, "gathers": True},
}


@pytest.mark.parametrize("keys", TAKEN.values(), ids=TAKEN)
@pytest.mark.parametrize("pool_share", [0.0, 0.5])
def test_what_a_call_takes_of_memory_is_known_without_its_seconds(keys: dict[str, Any], pool_share: float) -> None:
    costs = costs_of(replace(WORK, **keys), a_cluster(software=replace(SOFTWARE, pool_share=pool_share)))
    for bounded in (costs, BoundedMoves(costs)):
        for sizes in (Parallelism(4), Parallelism(1, 2, 2), Parallelism(2, 1, 2, (3, 1))):
            layout = Layout(Mesh(tuple(range(4))), sizes)
            for call, mode in (("actor.generate", "decode"), ("ref.logprobs", "score"), ("actor.train", "train")):
                assert bounded.working_bytes(call, mode, layout) == costs.call(call, mode, layout).working_bytes
            schedule = {"micro_batch_tokens": 20, "schedule": "one at a time"}
            found = costs.call("actor.train", "train", layout, **schedule).working_bytes
            assert bounded.working_bytes("actor.train", "train", layout, **schedule) == found


def test_scoring_on_one_device() -> None:
    """8 samples, two to a prompt: 4 * 8 + 8 * 8 tokens. 16 a row read a key each: those before them and their own."""
    costs: Costs = costs_of(WORK)
    tokens, pairs = 96, 4 * 36 + 8 * (8 * 8 + 36)
    check(
        costs.call("ref.logprobs", "score", Layout.on(range(1))),
        {
            "products": 4 * 2 * tokens * LAYER / 0.5e9,
            "attention": 4 * 4 * pairs * 64 / 0.5e9,
            "head": 2 * 64 * HEAD / 0.5e9,
        },
    )


def test_weights_are_read_where_tokens_are_few() -> None:
    """One token's products take 2 * LAYER / 0.5e9 s, reading the weights 2 * LAYER / 0.5e8 s: ten times as long."""
    one = Workload(1, 1, SampleLengths(Lengths.fixed(1), Lengths.fixed(1)))
    found = costs_of(one).call("ref.logprobs", "score", Layout.on(range(1)))
    layers = found.terms["products"] + found.terms["attention"] + found.terms["reading"]
    assert layers == pytest.approx(4 * 2 * LAYER / 0.5e8)


def test_kernels_are_launched_one_by_one() -> None:
    slow = a_cluster(software=Software(0.5, 0.5, 0.5, layer_s=1.0, hop_s=0.0))
    found = costs_of(WORK, slow).call("ref.logprobs", "score", Layout.on(range(1)))
    assert found.seconds - found.terms["head"] == pytest.approx(4 * 1.0)


def test_tensor_parallel_sums_twice_a_layer() -> None:
    found = costs_of(WORK).call("ref.logprobs", "score", Layout.on(range(4), tp=4))
    each = 1e-4 + 2 * 3 / 4 * 96 * 64 * 2 / 0.5e8
    assert found.terms["tensor parallel"] == pytest.approx(4 * 2 * each)
    assert found.terms["products"] == pytest.approx(2 * 96 * LAYER / 0.5e9)


def test_training_with_data_parallel_ranks() -> None:
    """An optimizer step: gradients in float32 are summed, new weights in bfloat16 gathered, each over two ranks."""
    work = Workload(4, 2, LENGTHS, "bfloat16", micro_batch_tokens=1000)
    costs = costs_of(work)
    one, two = (costs.call("actor.train", "train", Layout.on(range(n), dp=n)) for n in (1, 2))
    steps = costs.flow.optimizer_steps("actor")
    assert two.terms["gradients"] == pytest.approx(steps * (1e-4 + 0.5 * 4 * elements() / 0.5e8))
    assert two.terms["new weights"] == pytest.approx(steps * (1e-4 + 0.5 * 2 * elements() / 0.5e8))
    assert one.terms["products"] == pytest.approx(2 * two.terms["products"])
    assert one.terms["products"] == pytest.approx(steps * 3 * 4 * 2 * 96 * LAYER / 0.5e9 / steps_per_epoch(costs))
    assert one.terms["optimizer"] == pytest.approx(steps * (2 * 12 + 2 + 4) * elements() / 0.5e8)


@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_that_are_left_to_another_call_make_no_optimizer_step(sharded: bool) -> None:
    """Nor are they summed over ranks, but where that is done in every micro-batch. Their forwards and backwards are as
    they would be."""
    work = Workload(4, 2, LENGTHS, "bfloat16", micro_batch_tokens=24, sharded=frozenset({"actor"} if sharded else ()))

    def of(with_next: bool, layout: Layout) -> list[CallCost]:
        def flow(prompts, actor):
            samples = actor.generate(prompts)
            actor.train(samples, loss=lambda batch: batch, mini_batches=4, with_next=with_next)
            actor.train(samples, loss=lambda batch: batch, mini_batches=4)

        traced = trace(flow, roles=("actor",))
        costs = ModelCosts(work, {"actor": SHAPE}, traced, a_cluster())
        assert traced.optimizer_steps("actor") == (4 if with_next else 8)
        return [costs.call(call, "train", layout) for call in ("actor.train", "actor.train#2")]

    (left, last), (alone, _) = (of(with_next, Layout.on(range(2), dp=2)) for with_next in (True, False))
    assert last.terms == alone.terms
    dropped = {"optimizer", "new weights", *(() if sharded else ("gradients",))}
    assert {**left.terms, **dict.fromkeys(dropped, 0.0)} == {**alone.terms, **dict.fromkeys(dropped, 0.0)}
    assert all(left.terms.get(name, 0.0) == 0 for name in dropped)
    assert left.bytes < alone.bytes
    # In a pipeline the micro-batches of both are one behind the other, so that more may be under way.
    one, both = (of(with_next, Layout.on(range(4), pp=4))[1] for with_next in (False, True))
    assert one.working_bytes[-1] == both.working_bytes[-1]
    assert one.working_bytes[0] < both.working_bytes[0]


def test_gradients_that_are_divided_are_summed_in_every_micro_batch() -> None:
    """A prompt and its two samples in each: 24 tokens are the most, and a device has two of the four prompts."""
    whole = Workload(4, 2, LENGTHS, "bfloat16", micro_batch_tokens=24)
    found = [
        costs_of(work).call("actor.train", "train", Layout.on(range(2), dp=2))
        for work in (whole, replace(whole, sharded=frozenset({"actor"})))
    ]
    once, each = (cost.terms["gradients"] for cost in found)
    assert each == pytest.approx(2 * once)
    assert found[1].terms["new weights"] == found[0].terms["new weights"]


def test_in_a_pipeline_divided_gradients_are_summed_stage_by_stage() -> None:
    """A device has two prompts, and both stages have two micro-batches: the first waits for a sum of the last, too."""
    whole = Workload(4, 1, LENGTHS, "bfloat16", micro_batch_tokens=24)
    found = [
        costs_of(work).call("actor.train", "train", Layout.on(range(4), dp=2, pp=2))
        for work in (whole, replace(whole, sharded=frozenset({"actor"})))
    ]
    once, each = (cost.terms["gradients"] for cost in found)
    assert each == pytest.approx((2 + 1) * once)
    assert found[1].terms["new weights"] == found[0].terms["new weights"]


def given_costs(algorithm: str, groups: list[GroupTokens], count: int, root: int = 0) -> ModelCosts:
    flow = a_flow(algorithm)
    work = Workload(count, 1, SampleLengths.given(groups, root), "bfloat16", micro_batch_tokens=1000)
    return ModelCosts(work, dict.fromkeys(flow.roles, SHAPE), flow, a_cluster())


def test_given_examples_count_as_long_as_they_are() -> None:
    """Of 40 + 1 and of 2 + 6 tokens, one of each: 820 + 41 and 3 + 33 pairs; seven rows pass the
    head, which take less than reading it."""
    found = given_costs("sft", [GroupTokens(40, (1,)), GroupTokens(2, (6,))], 2)
    terms = found.call("actor.train", "train", Layout.on(range(1))).terms
    assert terms["products"] == pytest.approx(3 * 4 * 2 * 49 * LAYER / 0.5e9)
    assert terms["attention"] == pytest.approx(3 * 4 * 4 * (861 + 36) * 64 / 0.5e9)
    assert terms["head"] == pytest.approx(3 * 2 * HEAD / 0.5e8)
    assert found.workload.tokens_of_step(found.flow) == 49


def test_given_pairs_have_their_prompt_once_and_what_all_begin_with() -> None:
    """Pairs of 40 + 4 + 2 and 36 + 2 + 8 tokens, of which 32 begin both prompts: 46 + 46 less 32. To score, 40 and 36
    tokens see themselves and those before, the root's 528 pairs once; 6 and 10 tokens the prompt and theirs."""
    found = given_costs("dpo", [GroupTokens(40, (4, 2)), GroupTokens(36, (2, 8))], 2, root=32)
    terms = found.call("ref.logprobs", "score", Layout.on(range(1))).terms
    assert terms["products"] == pytest.approx(4 * 2 * 60 * LAYER / 0.5e9)
    pairs = 820 + 666 - 528 + (6 * 40 + 10 + 3) + (10 * 36 + 3 + 36)
    assert terms["attention"] == pytest.approx(4 * 4 * pairs * 64 / 0.5e9)
    assert terms["head"] == pytest.approx(2 * 16 * HEAD / 0.5e9)


def test_pairs_that_are_trained_on_stay_together() -> None:
    """Three over two copies: one trains on two. Over two stages there are as many micro-batches as pairs; a reference
    may score them apart, in eight of the twelve that the prompts are worth it."""
    found = given_costs("dpo", [GroupTokens(1, (20, 20))], 3)
    one, two = (found.call("actor.train", "train", Layout.on(range(n), dp=n)) for n in (1, 2))
    assert two.terms["products"] == pytest.approx(2 / 3 * one.terms["products"])
    piped = found.call("actor.train", "train", Layout.on(range(2), pp=2))
    assert piped.terms["filling and draining"] * 3 == pytest.approx(piped.terms["products"] + piped.terms["attention"])
    apart = found.call("ref.logprobs", "score", Layout.on(range(2), pp=2))
    assert apart.terms["products"] == pytest.approx(2 * 2 * 6 * 21 * LAYER / 0.5e9)


def steps_per_epoch(costs: ModelCosts) -> int:
    return next(node for node in costs.flow.nodes if node.call == "actor.train").training.mini_batches


def elements() -> int:
    """Embedding, head, norms and layers; every block begins at a multiple of 32 elements."""
    return 2 * HEAD + 4 * (LAYER + 2 * 64) + 64


def test_a_pipeline_fills_and_drains_once() -> None:
    """Four micro-batches, a prompt with its samples each; the last stage, with the head, is the slower of two. Of 1,536
    bytes of ids and results each stage gets all, one of the two over the link to its host."""
    found = costs_of(WORK).call("ref.logprobs", "score", Layout.on(range(2), pp=2))
    layer = (2 * 24 * LAYER + 4 * 236 * 64) / 0.5e9
    check(
        found,
        {
            "products": 4 * 2 * 2 * 24 * LAYER / 0.5e9,
            "attention": 4 * 2 * 4 * 236 * 64 / 0.5e9,
            "head": 4 * max(2 * 16 * HEAD / 0.5e9, 2 * HEAD / 0.5e8),
            "filling and draining": 2 * layer,
            "hops": 1e-4 + 24 * 64 * 2 / 0.5e8,
            "rows": 1536 / 0.5e7,
        },
    )


def test_rows_go_through_one_rank() -> None:
    """8 samples: 4 prompts there, responses and log-probs back, of which one of two ranks has its half; to two copies
    that train ids, log-probs and what the loss reads."""
    costs = costs_of(WORK)
    generated = costs.call("actor.generate", "decode", Layout.on(range(2), dp=2))
    assert generated.terms["rows"] == pytest.approx(8 * (4 * 8 + 2 * 8 * 8) / 2 / 0.5e7)
    train = next(node for node in costs.flow.nodes if node.call == "actor.train")
    trained = costs.call("actor.train", "train", Layout.on(range(2), dp=2))
    assert trained.terms["rows"] == pytest.approx(8 * 8 * (8 + (2 + len(train.inputs)) * 8) / 2 / 0.5e7)
    far = costs_of(WORK, a_cluster(4, nodes=2)).call("ref.logprobs", "score", Layout.on(range(4), dp=4))
    sent = 1536 * 3 / 4
    assert far.terms["rows"] == pytest.approx(sent / 2 / 0.5e7 + sent / 2 / 0.5e7 + 3 * 1e-3)


def test_instances_of_several_placements_share_the_samples() -> None:
    """As two copies of one placement do. Of unlike ones each has two of four prompts, and takes what it takes for these
    alone."""
    costs, half = costs_of(WORK), costs_of(replace(WORK, prompts_per_step=2))
    one, other, pair = (Layout.on(ranks, tp=len(ranks)) for ranks in ((0,), (1,), (1, 2)))
    generate = lambda of, layout, *layouts: of.call(
        "actor.generate", "decode", layout, spread=Spread((), layouts) if layouts else None
    )
    whole = generate(costs, Layout.on((0, 1), dp=2))
    for layout in (one, other):
        part = generate(costs, layout, one, other)
        assert (part.terms, part.tails, part.working_bytes) == (whole.terms, whole.tails, whole.working_bytes)
        assert part.instance_seconds == whole.instance_seconds[:1]
    for layout in (one, pair):
        part, alone = generate(costs, layout, one, pair), generate(half, layout)
        rows_s = alone.terms.get("rows", 0.0)
        assert part.instance_seconds == pytest.approx((alone.seconds - rows_s,))
        assert part.working_bytes == alone.working_bytes
        assert part.terms["rows"] == pytest.approx(8 * (4 * 8 + 2 * 8 * 8) * 2 / 3 / 0.5e7)


def test_heads_that_do_not_divide_make_one_device_the_slower() -> None:
    """Three key-value heads of three query heads each over two devices: six query heads on one of them; of the MLP
    half."""
    odd = replace(SHAPE, heads=9, kv_heads=3, attention_parameters=900, intermediate=10, hidden=10)
    work = ModelWork(odd, "bfloat16", 1)
    assert work.share(2) == pytest.approx((900 * 6 / 9 + 300 / 2) / 1200)
    assert work.share(1) == 1.0
    assert ModelWork(SHAPE, "bfloat16", 1).share(4) == 0.25


def test_decoding_takes_a_step_for_each_token_but_the_first() -> None:
    fixed = a_cluster(software=Software(1.0, 1.0, 1.0, layer_s=1.0, hop_s=0.0))
    costs = costs_of(Workload(4, 2, LENGTHS, max_running=4), fixed)
    found = costs.call("actor.generate", "decode", Layout.on(range(1)))
    prompts = costs.call("actor.generate", "prefill", Layout.on(range(1)))
    head = 2 * HEAD / 1e8
    assert found.seconds - prompts.seconds == pytest.approx(2 * 7 * (4 * 1.0 + head))
    assert found.instance_seconds == (found.seconds,)
    assert found.working_bytes == (4 * 16 * 2 * 4 * 64 * 2,)


def test_prompts_that_begin_alike_are_computed_and_held_once_as_far_as_they_do() -> None:
    """Four prompts of 40 tokens, of which all begin with two blocks: 96 tokens less, and 3 times the pairs of 32. A
    pool of 96 tokens has room for 4 samples of 48 tokens in place of 2: 8 of them take two waves of 7 steps."""
    lengths = SampleLengths(Lengths.fixed(40, root=33), Lengths.fixed(8))
    apart, alike = Workload(4, 2, lengths), Workload(4, 2, lengths, shared_root=32, held_root=32)
    layout = Layout.on(range(1))
    apart_s, alike_s = (
        costs_of(work).call("actor.generate", "prefill", layout).terms["prompts"] for work in (apart, alike)
    )
    assert apart_s - alike_s == pytest.approx(4 * (2 * 96 * LAYER + 4 * 3 * 528 * 64) / 0.5e9)
    held = (costs_of(work).call("actor.generate", "decode", layout).working_bytes for work in (apart, alike))
    assert list(held) == [(tokens * 2 * 4 * 64 * 2,) for tokens in (8 * 48, 32 + 8 * 16)]
    fixed = a_cluster(software=Software(1.0, 1.0, 1.0, layer_s=1.0, hop_s=0.0))
    for work, waves in ((apart, 4), (alike, 2)):
        costs = costs_of(replace(work, kv_tokens=96), fixed)
        whole, prompts = (costs.call("actor.generate", mode, layout).seconds for mode in ("decode", "prefill"))
        assert whole - prompts == pytest.approx(waves * 7 * (4 * 1.0 + 2 * HEAD / 1e8))


def test_stages_decode_as_a_ring_of_as_many_groups_as_a_run_has() -> None:
    """Layers of a second: two groups keep both stages busy, one at a time, so a token of all takes no longer than on
    one device, and with one group as the recipe may say, or a cluster's software, as long as both stages one by one."""
    slow = a_cluster(software=Software(1.0, 1.0, 1.0, layer_s=1.0, hop_s=0.0))
    layout = Layout.on(range(2), pp=2)

    def terms(cluster: ClusterSpec, groups: int | None = None) -> float:
        work = Workload(4, 2, LENGTHS, stated_groups=groups, device="cpu")
        found = costs_of(work, cluster).call("actor.generate", "decode", layout).terms
        return found["launching"]

    rule = num_groups(COSTS["cpu"], 2, 8)
    assert rule in (2, 3)
    assert terms(slow) == pytest.approx(7 * 2 * rule, rel=0.01)
    assert terms(slow, 1) == pytest.approx(7 * 4, rel=0.01)
    one_group = replace(slow, software=replace(slow.software, decode_groups_per_stage=0))
    assert terms(one_group) == pytest.approx(terms(slow, 1))


def test_a_pool_of_keys_and_values_bounds_what_runs() -> None:
    """Room for the keys and values of two samples of 16 tokens: two at a time take four times as many steps as eight.
    Graphs are counted as if the pool had room for all."""
    fixed = a_cluster(software=Software(1.0, 1.0, 1.0, layer_s=1.0, hop_s=0.0))
    works = [Workload(4, 2, LENGTHS, kv_tokens=tokens, device="cuda") for tokens in (8 * 16, 2 * 16)]
    most, few = (costs_of(work, fixed).call("actor.generate", "decode", Layout.on(range(1))) for work in works)
    assert few.terms["launching"] == pytest.approx(4 * most.terms["launching"], rel=1e-3)
    (graphs,) = held_by_graphs(works[0], SHAPE, 8)
    assert (graphs,) == held_by_graphs(works[1], SHAPE, 8)
    kept = [cost.working_bytes[0] - cost.passing_bytes[0] - graphs for cost in (few, most)]
    assert kept[0] == kept[1] // 4 > 0


def test_a_pool_takes_what_others_leave_of_its_share() -> None:
    """Half of a device, less what is held there: room for two samples of 16 tokens, as eight of the weights alone."""
    software = Software(1.0, 1.0, 1.0, layer_s=1.0, hop_s=0.0, pool_share=0.5)
    costs, place = costs_of(Workload(4, 2, LENGTHS), a_cluster(software=software)), Layout.on(range(1))
    holding = lambda num_bytes: costs.generation("actor.generate", place, Spread((), (place,)), (num_bytes,))
    assert costs.pool_takes_rest
    assert not costs_of(WORK).pool_takes_rest
    alone = costs.call("actor.generate", "decode", place)
    sample_bytes = 16 * 2 * 4 * 64 * 2
    assert alone.working_bytes == (8 * sample_bytes,)
    beside = holding((1 << 29) - 2 * sample_bytes)
    assert beside.working_bytes == (2 * sample_bytes,)
    assert beside.terms["launching"] == pytest.approx(4 * alone.terms["launching"], rel=1e-3)
    assert holding(costs.held_bytes("actor", place, trained=False)[0]) == alone
    full = holding(1 << 30)
    assert full.working_bytes == (sample_bytes,), "one at a time at least: it is the memory that says it does not fit"


def test_samples_of_13b_take_two_waves_on_sixteen_gpus() -> None:
    """64 samples of 2,048 tokens on each have keys and values of 107 GB; a pool of 80 GB lets 47 of them run at once.
    A step takes 40 layers, a second each: twice 1,023 steps, as all samples are equally long."""
    shape = ModelShape.from_config(KNOWN["llama-2-13b"])
    lengths = SampleLengths(Lengths.fixed(1024), Lengths.fixed(1024))
    tokens = int(80e9 // kv_bytes_per_token(shape, "bfloat16"))
    assert tokens // 2048 == 47
    flow, slow = a_flow(), a_cluster(16, software=Software(1.0, 1.0, 1.0, layer_s=1.0, hop_s=0.0))
    fast = replace(slow, device=replace(DEVICE, flops=1e18, memory_bandwidth=1e18))

    def launching(kv_tokens: int | None) -> float:
        work = Workload(1024, 1, lengths, max_running=1024, kv_tokens=kv_tokens, device="cuda")
        costs = ModelCosts(work, dict.fromkeys(flow.roles, shape), flow, fast)
        return costs.call("actor.generate", "decode", Layout.on(range(16), dp=16)).terms["launching"]

    prompts = launching(None) - 1023 * 40.0
    assert launching(tokens) == pytest.approx(prompts + 2 * 1023 * 40.0, rel=0.02)


def test_drafts_take_rows_and_save_steps() -> None:
    """Two tokens a step of three rows: half as many steps, each of as long where rows are free, else of three times."""
    fixed = a_cluster(software=Software(1.0, 1.0, 1.0, layer_s=1.0, hop_s=0.0))
    plain, drafted = (
        costs_of(Workload(4, 2, LENGTHS, drafts=drafts), fixed).call("actor.generate", "decode", Layout.on(range(1)))
        for drafts in (NO_DRAFTS, Drafts(tokens=2.0, rows=3.0))
    )
    assert drafted.terms["launching"] == pytest.approx(plain.terms["launching"] / 2, rel=1e-3)
    assert drafted.terms["products"] == pytest.approx(plain.terms["products"] * 1.5)


DRAFTED = Drafts(tokens=2.0, rows=1.0)
"""Two tokens a step, for as many rows as without drafts: half as many steps."""


def test_drafts_bring_the_end_of_the_longest_sample_nearer() -> None:
    """Instances that give each other samples end with the longest of these: 399 steps of four layers, or half."""
    lengths = SampleLengths(Lengths.fixed(8), Lengths.recorded([2] * 7 + [400]))
    fixed = a_cluster(software=Software(1.0, 1.0, 1.0, layer_s=1.0, hop_s=0.0))
    plain, drafted = (
        costs_of(Workload(8, 1, lengths, max_running=1, rebalances=True, drafts=drafts), fixed).call(
            "actor.generate", "decode", Layout.on(range(2), dp=2)
        )
        for drafts in (NO_DRAFTS, DRAFTED)
    )
    assert plain.instance_seconds[0] == pytest.approx(399 * SHAPE.layers, rel=1e-3)
    assert drafted.instance_seconds[0] == pytest.approx(399 / 2 * SHAPE.layers, rel=1e-3)


def test_drafts_halve_what_gathering_the_last_samples_gains_and_takes() -> None:
    lengths = SampleLengths(Lengths.fixed(8), Lengths.recorded(range(20, 1300, 20)))
    fixed = a_cluster(software=Software(1.0, 1.0, 1.0, layer_s=1.0, hop_s=0.0))
    plain, drafted = (
        costs_of(Workload(64, 1, lengths, gathers=True, drafts=drafts), fixed).call(
            "actor.generate", "decode", Layout.on(range(4), dp=4)
        )
        for drafts in (NO_DRAFTS, DRAFTED)
    )
    assert len(plain.tails) == len(drafted.tails) > 1
    for one, other in zip(plain.tails, drafted.tails, strict=True):
        assert other.idle_s == pytest.approx(one.idle_s / 2, rel=0.05)
        assert other.move_s == one.move_s


def test_a_draft_model_takes_forwards_of_its_own() -> None:
    """Seven steps beside the first token, two tokens each, and the prompts: 7 / 2 · 2 forwards of its two layers and
    its head for all samples, and one of the prompts. A layer takes a second, the head the reading of its weights."""
    fixed = a_cluster(software=Software(1.0, 1.0, 1.0, layer_s=1.0, hop_s=0.0))
    drafts, small = Drafts(tokens=2.0, rows=3.0, passes=2.0), replace(SHAPE, layers=2)
    without, found = (
        costs_of(Workload(4, 2, LENGTHS, drafts=drafts, draft_model=model), fixed).call(
            "actor.generate", "decode", Layout.on(range(1))
        )
        for model in (None, small)
    )
    plain = {name: seconds for name, seconds in without.terms.items() if seconds}
    check(found, {**plain, "draft model": (7 / 2 * 2 + 1) * (2 * 1.0 + HEAD * 2 / 1e8)})


@pytest.mark.parametrize("pp", [1, 2])
def test_many_steps_with_a_draft_model_are_those_of_each(pp: int) -> None:
    """It computes before the first stage does."""
    cluster, layout = a_cluster(), Layout.on(range(pp), pp=pp)
    passes = Passes(LayerTimes(cluster, ModelWork(SHAPE, "bfloat16", 1000), layout))
    small = Passes(LayerTimes(cluster, ModelWork(replace(SHAPE, layers=2), "bfloat16", 1000), Layout.on(range(1))))
    lengths, drafts = (9, 5, 5, 2), Drafts(2.0, 3.0, 2.0)
    for drafting in (Drafting(drafts), Drafting(drafts, small)):
        decoding = Decoding(passes, 8.0, lambda running: min(running, pp), drafting)
        found = decoding.totals(Pieces.of([lengths], 4))
        assert found == pytest.approx([total(decoding.seconds(profile(lengths, 4)))])


def test_a_length_that_is_fixed_says_what_a_draft_model_does() -> None:
    """Two tokens by 0.8 and 0.64, two rows, two forwards."""
    assert Drafts.fixed(2) == Drafts(pytest.approx(1 + 0.8 + 0.64), 3.0, 2.0)
    assert TRUST == acceptance.TRUST


def test_instances_that_give_each_other_samples_end_together() -> None:
    lengths = SampleLengths(Lengths.fixed(8), Lengths.recorded([2, 3, 4, 40]))
    fixed = a_cluster(software=Software(1.0, 1.0, 1.0, layer_s=1.0, hop_s=0.0))
    layout = Layout.on(range(2), dp=2)
    apart, even = (
        costs_of(Workload(8, 1, lengths, max_running=1, rebalances=flag), fixed).call(
            "actor.generate", "decode", layout
        )
        for flag in (False, True)
    )
    assert len(set(even.instance_seconds)) == 1
    assert max(apart.instance_seconds) >= even.instance_seconds[0] >= sum(apart.instance_seconds) / 2 * 0.999
    assert sum(even.terms.values()) == pytest.approx(even.seconds)


def test_ways_in_which_a_generation_may_end() -> None:
    """Two instances, one long sample each: gathered, they end as late, and one instance is free since before."""
    lengths = SampleLengths(Lengths.fixed(8), Lengths.recorded([2, 2, 2, 2, 2, 2, 2, 100]))
    fixed = a_cluster(software=Software(1.0, 1.0, 1.0, layer_s=1.0, hop_s=0.0))
    layout = Layout.on(range(2), dp=2)
    alone, gathered = (
        costs_of(Workload(16, 1, lengths, gathers=flag), fixed).call("actor.generate", "decode", layout).tails
        for flag in (False, True)
    )
    assert len(alone) == 1
    assert gathered[0] == alone[0]
    best = max(gathered, key=lambda tail: tail.idle_s)
    assert best.idle_s > alone[0].idle_s
    assert best.end_s == pytest.approx(alone[0].end_s, rel=0.1)
    assert best.move_s > 0


def test_a_move_is_that_of_the_planner() -> None:
    """Halves of every matrix that is cut go the other way; what is replicated stays where it is."""
    costs = costs_of(WORK, a_cluster(2))
    found = costs.move("actor", Layout.on(range(2), tp=2), Layout.on(range(2), dp=2))
    cut = HEAD + 4 * LAYER
    assert found.bytes == cut * 2
    assert found.terms["links"] == pytest.approx(1e-4 + cut / 2 * 2 / 0.5e8)
    assert costs.move("actor", Layout.on(range(2), tp=2), Layout.on(range(2), tp=2)).seconds == 0


def test_where_no_layer_gets_an_adapter_nothing_moves() -> None:
    """A shape of a mixture, whose MLPs get none: a model would be refused."""
    lora = LoraSettings(rank=2, target_modules=("up_proj",))
    mixture = replace(SHAPE, experts=4, experts_per_token=2, expert_layers=4, expert_intermediate=32)
    costs = ModelCosts(replace(WORK, lora=lora), {"actor": mixture}, a_flow("grpo"), a_cluster(2))
    moved = costs.move("actor", Layout.on(range(2), pp=2), Layout.on(range(2), dp=2))
    assert (moved.seconds, moved.bytes) == (0.0, 0)


def test_a_move_of_a_role_with_an_adapter_is_of_that_alone() -> None:
    """A is [2, in], B [out, 2]. B of q, k, v, gate, up is cut, and A of o and down: their halves go the other way."""
    lora = LoraSettings(rank=2)
    costs = costs_of(replace(WORK, lora=lora), a_cluster(2))
    halves, wholes = Layout.on(range(2), tp=2), Layout.on(range(2), dp=2)
    found, whole = costs.move("actor", halves, wholes), costs_of(WORK, a_cluster(2)).move("actor", halves, wholes)
    cut = 4 * 2 * (3 * 64 + 64 + 2 * 128 + 128)
    assert found.bytes == cut * 2
    assert found.seconds < whole.seconds
    assert costs.moved_bytes("actor") == 2 * adapter_parameters(SHAPE, lora)
    assert costs_of(WORK).moved_bytes("actor") == 2 * elements()
    bound = BoundedMoves(costs).move("actor", halves, wholes)
    assert 0 < bound.seconds <= found.seconds


def test_a_move_takes_what_the_software_takes_beside_its_bytes() -> None:
    """Each of the two sends a half of what is cut, and receives one: two bytes of each number, at 1 kB a second."""
    software = replace(SOFTWARE, switch_s=3.0, pack_bandwidth=1e3)
    plain, costs = costs_of(WORK, a_cluster(2)), costs_of(WORK, a_cluster(2, software=software))
    halves, wholes = Layout.on(range(2), tp=2), Layout.on(range(2), dp=2)
    known, found = (one.move("actor", halves, wholes) for one in (plain, costs))
    packed = 2 * (HEAD + 4 * LAYER) / 2 * 2
    assert found.terms == pytest.approx({**known.terms, "switching": 3.0, "packing": packed / 1e3})
    assert found.seconds == pytest.approx(sum(found.terms.values()))
    assert costs.move("actor", halves, halves).seconds == 0, "where nothing moves, no engine is switched"
    bound = BoundedMoves(costs).move("actor", halves, wholes)
    assert 3.0 < bound.seconds <= found.seconds


def test_offloading_goes_over_the_hosts_links() -> None:
    costs = costs_of(WORK)
    weights = costs.offload("actor", Layout.on(range(2), dp=2), "weights")
    state = costs.offload("actor", Layout.on(range(2), dp=2), "state")
    assert weights.seconds == pytest.approx(2 * elements() / 0.5e7)
    assert state.seconds == pytest.approx(12 * elements() / 2 / 0.5e7)
    assert (weights.bytes, state.bytes) == (2 * 2 * elements(), 12 * elements())


def test_held_bytes() -> None:
    costs = costs_of(WORK)
    assert costs.held_bytes("actor", Layout.on(range(1)), trained=False) == (2 * elements(),)
    assert costs.held_bytes("actor", Layout.on(range(1)), trained=True) == (18 * elements(),)
    assert costs.held_bytes("actor", Layout.on(range(2), dp=2), trained=True) == (12 * elements(),)
    divided = costs_of(replace(WORK, sharded=frozenset({"actor"})))
    rooms = 2 * 4 * elements()  # of two runs, none longer than the model
    assert divided.held_bytes("actor", Layout.on(range(2), dp=2), trained=True) == (10 * elements() + rooms,)
    assert divided.held_bytes("actor", Layout.on(range(1)), trained=True) == (18 * elements(),)


def test_reward_functions_share_their_processes() -> None:
    flow = a_flow()
    work = Workload(4, 2, LENGTHS, function_s=0.5, workers=3)
    costs = ModelCosts(work, {"actor": SHAPE, "ref": SHAPE, "critic": SHAPE}, flow, a_cluster())
    check(costs.call("reward.score", "score", Layout.on(range(1))), {"functions": 3 * 0.5})


def test_layers_that_go_one_way_are_planned_as_one() -> None:
    """Bytes are those of the plan that a run makes, with any numbers of stages."""
    parameters, cluster = parameters_of_shape(SHAPE), a_cluster(8, 2)
    layouts = [Layout.on(range(8), *sizes) for sizes in ((2, 4, 1), (2, 2, 2), (8, 1, 1), (2, 1, 4), (1, 2, 4))]
    layouts.append(Layout.on(range(2, 6), 1, 2, 2))
    for source in layouts:
        held = weights(parameters, source, "bfloat16", "source")
        for target in layouts:
            plan = plan_move(held, weights(parameters, target, "bfloat16", "target"), cluster.mesh_cluster)
            found = move_cost(parameters, source, target, "bfloat16", cluster)
            assert found.bytes == (0 if source == target else plan.traffic.total_bytes)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 1), (1, 3, 2), (4, 2, 2), (1, 2, 4)])
def test_bytes_of_many_layouts_are_those_of_each_device(sizes: tuple[int, int, int]) -> None:
    """What a search adds up is what flat buffers have, tied embeddings and heads that do not divide included."""
    dp, tp, pp = sizes
    for shape in (SHAPE, replace(SHAPE, tied=True, vocabulary=101, intermediate=130)):
        parameters = parameters_of_shape(shape)
        layout = Parallelism(dp, tp, pp)
        for i, stage, once in product(range(tp), range(pp), (False, True)):
            whole = shard(parameters, layout, i, stage, once=once).num_elements
            assert held_elements(parameters, layout, i, stage, once=once) == whole


def test_stages_of_a_training_take_forwards_and_twice_as_much_back() -> None:
    """Two stages of two layers each, the whole step in two micro-batches of 48 tokens, of which 32 are of responses:
    attention reads the mean of all pairs."""
    tokens, pairs = 48, (4 * 36 + 8 * (8 * 8 + 36)) / 2
    layers = 2 * (2 * tokens * LAYER + 4 * pairs * 64) / 0.5e9
    head = 2 * 32 * HEAD / 0.5e9
    layout = Layout.on(range(2), pp=2)
    (first, last) = costs_of(WORK).stage_seconds("actor.train", layout, 2)
    assert first == pytest.approx((layers, 2 * layers))
    assert last == pytest.approx((layers + head, 2 * (layers + head)))
    again = costs_of(replace(WORK, checkpoint_activations=True)).stage_seconds("actor.train", layout, 2)
    assert again[1] == pytest.approx((layers + head, 2 * (layers + head) + layers)), "the head is not computed again"
