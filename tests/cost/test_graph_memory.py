"""What CUDA graphs hold. How many there are is counted as a run makes them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.cost.device_memory import memory_by_device
from plait.cost.generation_bytes import held_by_graphs
from plait.cost.graph_memory import GRAPHS
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.workload import Workload
from plait.recipes.engine_checks import max_draft_tokens
from plait.schedule.plan import POOL, PolicyChoice
from tests.cost.smollm2 import SHAPE
from tests.cost.test_device_memory import facts_of, named, row_of

STEP = Workload(
    prompts_per_step=4,
    samples_per_prompt=16,
    lengths=SampleLengths(Lengths.fixed(100), Lengths.fixed(256)),
    max_running=48,
    device="cuda",
)
"""Contexts of 101 to 356 tokens: graphs for up to 128, 256 and 512."""


OF_PROMPTS = 16 * (1024 + 512) * 576 * 2


@pytest.mark.parametrize(
    ("how", "changed", "share", "rows"),
    [
        ("48 samples: graphs of 1, 2, ... 64 rows", {}, 64, 127),
        ("7 samples", {}, 7, 15),
        ("no graph has more than 256 rows", {"max_running": 1000}, 1000, 511),
        (
            "drafts of 3: two new tokens in 2 to 128 rows, of two numbers of samples; four in 4 to 256, of three",
            {"most_new_tokens": 4},
            64,
            127 + 2 * 254 + 3 * 508,
        ),
    ],
)
def test_each_graph_keeps_the_logits_of_its_rows(how: str, changed: dict[str, int], share: int, rows: int) -> None:
    """And sixteen with prompts the hidden states of 1,024 rows of prompts, and of 512 beside them."""
    (held,) = held_by_graphs(replace(STEP, **changed), SHAPE, share)
    assert held == 3 * rows * 49_152 * 2 + OF_PROMPTS, how


def test_a_draft_model_has_graphs_of_its_own() -> None:
    """Of one new token of a sample and of two, whatever is drafted; the first of two stages gives hidden states."""
    drafted = replace(STEP, draft_model=replace(SHAPE, vocabulary=1000))
    first, held = held_by_graphs(drafted, SHAPE, 64, stages=2)
    assert first == 3 * 2 * (127 * 576 + (127 + 2 * 254) * 1000) + OF_PROMPTS
    assert held == 3 * 2 * (127 * 49_152 + (127 + 2 * 254) * 1000) + 2 * OF_PROMPTS, "and what comes to it"
    assert held_by_graphs(replace(drafted, device="cpu"), SHAPE, 64) == (0,)


def test_in_float32_they_are_twice_as_large() -> None:
    assert held_by_graphs(replace(STEP, dtype="float32"), SHAPE, 64) == (3 * 127 * 49_152 * 4 + 2 * OF_PROMPTS,)


@pytest.mark.parametrize("changed", [{"device": "cpu"}, {"elsewhere": True}])
def test_there_are_none_on_a_cpu_and_in_another_engine(changed: dict[str, object]) -> None:
    assert held_by_graphs(replace(STEP, **changed), SHAPE, 64) == (0,)


def test_a_dry_run_has_them_where_samples_are_generated() -> None:
    facts = facts_of(named("colocated", 1), "grpo", device="cuda", sampling={"kv_tokens": 1 << 15, "speculation": 3})
    assert max_draft_tokens(facts.recipe) == 3
    rows = dict(memory_by_device(facts)[0].rows)
    workload = Workload.of(facts.recipe, facts.flow, facts.lengths)
    samples = workload.prompts_per_step * workload.samples_per_prompt
    assert (row_of(f"actor: {GRAPHS}", rows),) == held_by_graphs(workload, SHAPE, samples)


def test_pools_that_stay_stay_with_a_draft_models() -> None:
    """Its keys and values, for as many tokens as the policy's pool holds, and its graphs: beside training, too."""
    sampling = {"kv_tokens": 1 << 15, "speculation": 3, "draft_model": "smollm"}
    facts = facts_of(named("colocated", 1), "grpo", device="cuda", sampling=sampling)
    kept = replace(facts, plan=replace(facts.plan, policies=(PolicyChoice(POOL),)))
    (gone,), (stay,) = memory_by_device(facts), memory_by_device(kept)
    rows = dict(stay.rows)
    keys_and_values = row_of(f"actor: draft model: KV cache ({1 << 15} tokens)", rows)
    assert keys_and_values == (1 << 15) * 2 * 30 * 3 * 64 * 2
    of_draft = keys_and_values + row_of(f"actor: draft model: {GRAPHS}", rows)
    of_policy = row_of("actor: KV cache", rows) + row_of(f"actor: {GRAPHS}", rows)
    assert dict(stay.during)["actor.train"] - dict(gone.during)["actor.train"] == of_policy + of_draft
    assert dict(stay.during)["actor.generate"] == dict(gone.during)["actor.generate"]


@pytest.mark.parametrize(("stated", "most"), [(5, 5), ("off", 0), ("adaptive", 15)])
def test_drafts_are_as_long_as_stated_or_as_they_may_be(stated: int | str, most: int) -> None:
    facts = facts_of(named("colocated", 1), "grpo", sampling={"speculation": stated})
    assert max_draft_tokens(facts.recipe) == most
