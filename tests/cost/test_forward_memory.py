"""What micro-batches take, computed by hand with the shape and machine of `test_model_costs`."""

from __future__ import annotations

from dataclasses import replace

from plait.cost.micro_batch import LargestBatch
from plait.cost.model_costs import ModelCosts
from plait.cost.working_memory import kept_logits
from plait.cost.workload import Workload
from plait.layout.mesh import Layout
from plait.models.lora_settings import LoraSettings
from plait.recipes.algorithm import load_flow, trace_algorithm
from plait.recipes.role_models import MODEL_ROLES, REWARD_ROLES
from tests.cost.test_model_costs import LENGTHS, SHAPE, a_cluster

WORK = Workload(8, 2, LENGTHS, "bfloat16", micro_batch_tokens=1000)
"""Eight groups of 8 + 2 x 8 tokens, with 8² + 16 x 16 scores of a head."""
BETWEEN, WITHIN = (4 * 2 + 8) * 64, 2 * (2 * 64 + 2 * 64 + 4 * 128)
"""Bytes of a token in a layer: those beside products that ranks divide, those of their inside."""
SCORES = 2 * 4 * (64 + 256)
"""Bytes of a group's attention weights in a layer, four heads in bfloat16."""
LOGITS, GRADIENT = 256 * 1000 * (2 + 8), 1000 * 64 * (4 + 4)
KEPT = 24 * 1000 * 2
"""Logits of a group's tokens, which may all be read, and stay for the backward."""


def costs(mini_batches: int = 1, work: Workload = WORK) -> ModelCosts:
    flow = trace_algorithm(load_flow("ppo"), {"mini_batches": mini_batches}, (*MODEL_ROLES, *REWARD_ROLES))
    return ModelCosts(work, dict.fromkeys(flow.roles, SHAPE), flow, a_cluster(8))


def trained(made: ModelCosts, dp: int = 1, tp: int = 1, pp: int = 1, schedule: str = "") -> tuple[int, ...]:
    layout = Layout.on(range(dp * tp * pp), dp, tp, pp)
    return made.call("actor.train", "train", layout, schedule=schedule).working_bytes


def test_a_micro_batch_is_of_one_mini_batch() -> None:
    """Eight groups at once; of four mini-batches over two copies one group each."""
    layer = 24 * (BETWEEN + WITHIN) + SCORES
    assert trained(costs()) == (8 * 4 * layer + LOGITS + GRADIENT + 8 * KEPT,)
    assert trained(costs(mini_batches=4), dp=2) == (4 * layer + LOGITS + GRADIENT + KEPT,)
    scored = costs(mini_batches=4).call("ref.logprobs", "score", Layout.on(range(1)))
    assert scored.working_bytes == (8 * layer + LOGITS,), "a score has no mini-batches, and keeps one layer"


def test_a_pipelines_stages_hold_as_many_as_are_in_flight() -> None:
    """Two stages want eight micro-batches, which is a group each: two in flight in the first, one in the last, whose
    head is at work beside."""
    layer, head = 24 * (BETWEEN + WITHIN) + SCORES, LOGITS + GRADIENT
    assert trained(costs(), pp=2) == (2 * 2 * layer, 1 * 2 * layer + head + KEPT)
    assert trained(costs(), pp=2, schedule="one at a time") == (2 * layer, 2 * layer + head + KEPT)
    assert trained(costs(), pp=2, schedule="gpipe") == (8 * 2 * layer, 8 * (2 * layer + KEPT) + head)


def test_ranks_divide_the_head() -> None:
    """A quarter of the vocabulary each, of products and of attention; what is beside these is on each of them."""
    layer = 24 * (BETWEEN + WITHIN // 4) + SCORES // 4
    assert trained(costs(), tp=4) == (8 * 4 * layer + LOGITS // 4 + GRADIENT // 4,)
    odd = costs().call("ref.logprobs", "score", Layout.on(range(3), tp=3)).working_bytes[0]
    assert odd == 8 * (24 * (BETWEEN + WITHIN // 3)) + 8 * SCORES // 3 + 256 * 334 * 10


def test_logits_that_stay_are_bounded_and_of_heads_that_one_kernel_serves() -> None:
    """On a CPU 256 MiB and bfloat16 alone, on a GPU 5 GiB and float32, too; a part of a head has no such kernel."""
    assert kept_logits(SHAPE, 2, "cpu", 24) == KEPT
    assert kept_logits(SHAPE, 2, "cpu", 800_000) == 256 * 2**20
    assert kept_logits(SHAPE, 4, "cpu", 24) == kept_logits(SHAPE, 2, "cuda", 24, tp=2) == 0
    assert kept_logits(SHAPE, 4, "cuda", 800_000) == 800_000 * 1000 * 4
    assert kept_logits(SHAPE, 4, "cuda", 1_600_000) == 5 * 2**30


def test_adapters_train_no_head_and_keep_what_a_makes() -> None:
    """Of seven layers two numbers each, in bfloat16."""
    layer = 24 * (BETWEEN + WITHIN + 2 * 7 * 2) + SCORES
    found = costs(work=replace(WORK, lora=LoraSettings(rank=2))).call("actor.train", "train", Layout.on(range(1)))
    assert found.working_bytes == (8 * 4 * layer + LOGITS + 8 * KEPT,)
    assert found.activation_bytes == found.plain_bytes == (8 * (4 * layer + KEPT),)
    assert LargestBatch.of_groups(8, 2, 8, 8).tokens == 8 * 24
