"""Seconds of calls, computed by hand on a machine of round numbers."""

from __future__ import annotations

import pytest

from plait.cost.cluster import ClusterSpec
from plait.cost.costs import CallCost, Costs
from plait.cost.hardware import Device, Link, Software
from plait.cost.model_costs import ModelCosts, parameters_of_shape
from plait.cost.moves import move_cost
from plait.cost.workload import Lengths, SampleLengths, Workload
from plait.dataflow import Dataflow
from plait.layout.holdings import weights
from plait.layout.mesh import Layout
from plait.layout.move import plan_move
from plait.models.shape import ModelShape
from plait.recipes.algorithm import load_flow, trace_algorithm
from plait.recipes.role_models import MODEL_ROLES, REWARD_ROLES

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


def steps_per_epoch(costs: ModelCosts) -> int:
    return next(node for node in costs.flow.nodes if node.call == "actor.train").training.mini_batches


def elements() -> int:
    """Embedding, head, norms and layers; every block begins at a multiple of 32 elements."""
    return 2 * HEAD + 4 * (LAYER + 2 * 64) + 64


def test_a_pipeline_fills_and_drains_once() -> None:
    """Eight micro-batches (four a stage); the last stage, with the head, is the slower of two."""
    found = costs_of(WORK).call("ref.logprobs", "score", Layout.on(range(2), pp=2))
    layer = (2 * 12 * LAYER + 4 * 118 * 64) / 0.5e9
    check(
        found,
        {
            "products": 8 * 2 * 2 * 12 * LAYER / 0.5e9,
            "attention": 8 * 2 * 4 * 118 * 64 / 0.5e9,
            "head": 8 * max(2 * 8 * HEAD / 0.5e9, 2 * HEAD / 0.5e8),
            "filling and draining": 2 * layer,
            "hops": 1e-4 + 12 * 64 * 2 / 0.5e8,
        },
    )


def test_decoding_takes_a_step_for_each_token_but_the_first() -> None:
    fixed = a_cluster(software=Software(1.0, 1.0, 1.0, layer_s=1.0, hop_s=0.0))
    costs = costs_of(Workload(4, 2, LENGTHS, max_running=4), fixed)
    found = costs.call("actor.generate", "decode", Layout.on(range(1)))
    prompts = costs.call("actor.generate", "prefill", Layout.on(range(1)))
    head = 2 * HEAD / 1e8
    assert found.seconds - prompts.seconds == pytest.approx(2 * 7 * (4 * 1.0 + head))
    assert found.instance_seconds == (found.seconds,)
    assert found.working_bytes == (4 * 16 * 2 * 4 * 64 * 2,)


def test_a_move_is_that_of_the_planner() -> None:
    """Halves of every matrix that is cut go the other way; what is replicated stays where it is."""
    costs = costs_of(WORK, a_cluster(2))
    found = costs.move("actor", Layout.on(range(2), tp=2), Layout.on(range(2), dp=2))
    cut = HEAD + 4 * LAYER
    assert found.bytes == cut * 2
    assert found.terms["links"] == pytest.approx(1e-4 + cut / 2 * 2 / 0.5e8)
    assert costs.move("actor", Layout.on(range(2), tp=2), Layout.on(range(2), tp=2)).seconds == 0


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
            assert found.bytes == (0 if source == target else plan.total_bytes)
