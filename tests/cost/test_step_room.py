"""What a step of generation takes for a moment, by hand. What steps take is held against it in
`tests.generation.test_device_step`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.cost.device_memory import memory_by_device
from plait.cost.step_room import STEP, LargestStep, step_bytes
from plait.layout.mesh import Parallelism
from tests.cost.smollm2 import SHAPE
from tests.cost.test_device_memory import facts_of, named, row_of

H, V, MLP = 576, 49_152, 1_536
PROMPTS = 4096
ONE = Parallelism()


def most(rows: int, sizes: Parallelism = ONE, *, filters: bool = False, prompts: int = PROMPTS) -> list[int]:
    step = LargestStep.of(prompts, rows, 1, filters=filters)
    return list(step_bytes(SHAPE, "bfloat16", step, sizes))


def test_prompts_take_most_in_a_layer() -> None:
    """Four tensors as wide as the model, four as wide as its MLP, of all tokens; parts of the MLP where ranks have
    some. Of few samples their logits are less."""
    tokens = PROMPTS + 1
    assert most(1) == [tokens * 2 * (4 * H + 4 * MLP)]
    assert most(1, Parallelism(1, 2)) == [tokens * 2 * (4 * H + 2 * MLP)]
    assert most(1, Parallelism(1, 1, 3)) == 3 * [tokens * 2 * (4 * H + 4 * MLP)]


def test_of_a_mixture_every_rank_has_all_pairs() -> None:
    """Four experts of 96 columns for each token: their hidden states four times, on each of two ranks as on one."""
    experts = {"experts": 16, "experts_per_token": 4, "expert_intermediate": 96, "expert_layers": 30}
    mixture, step = replace(SHAPE, intermediate=0, **experts), LargestStep(PROMPTS, 0, filters=False)
    for tp in (1, 2):
        assert step_bytes(mixture, "bfloat16", step, Parallelism(1, tp)) == (PROMPTS * 2 * (4 * H + 4 * 4 * H),)


@pytest.mark.parametrize(
    ("rows", "filters", "of_number"),
    [
        (64, False, 2 + 2 + 12),  # twice, and both with their difference in float32, where a step is captured first
        (64, True, 2 + 2 + 56),
        (1024, True, 2 + 2 + 56),
    ],
)
def test_logits_take_most_while_tokens_are_drawn(rows: int, filters: bool, of_number: int) -> None:
    assert most(rows, filters=filters, prompts=0) == [rows * (2 * H + V * of_number)]


def test_logits_are_compared_256_rows_at_a_time() -> None:
    assert most(1024, prompts=0) == [1024 * 2 * H + V * (1024 * 4 + 256 * 12)]


def test_ranks_of_tp_gather_all_logits() -> None:
    """Each has its columns, and all of them in parts: more than is compared of many rows, less than of few."""
    sizes = Parallelism(1, 2, 2)
    assert most(64, sizes, prompts=0) == [64 * 2 * (4 * H + 2 * MLP), 64 * (2 * H + V * (4 + 12))]
    assert most(2048, sizes, prompts=0)[1] == 2048 * (2 * H + V * (4 + 2 + 1))


@pytest.mark.parametrize(
    ("sampling", "filters"), [({}, False), ({"top_p": 0.9}, True), ({"top_p": 0.9, "temperature": 0.0}, False)]
)
def test_a_dry_run_has_it_where_gpus_generate(sampling: dict[str, float], filters: bool) -> None:
    keys: Any = {"sampling": {"kv_tokens": 1 << 15, **sampling}, "prompts_per_step": 8, "samples_per_prompt": 4}
    facts = facts_of(named("colocated", 1), "grpo", device="cuda", **keys)
    (device,) = memory_by_device(facts)
    count = row_of(f"actor: {STEP}", dict(device.rows))
    assert [count] == most(32, filters=filters)
    assert dict(device.during)["actor.generate"] - count >= row_of("actor: KV cache", dict(device.rows))
    (host,) = memory_by_device(replace(facts, recipe=facts.recipe.model_copy(update={"device": "cpu"})))
    assert f"actor: {STEP}" not in dict(host.rows)


def test_texts_that_drafts_come_from_are_not_on_a_gpu() -> None:
    keys: Any = {"sampling": {"kv_tokens": 1 << 15, "speculation": 3}}
    texts = "texts that drafts are taken from, at most"
    for device, are_there in (("cpu", True), ("cuda", False)):
        (memory,) = memory_by_device(facts_of(named("colocated", 1), "grpo", device=device, **keys))
        assert (texts in dict(memory.rows)) == are_there
