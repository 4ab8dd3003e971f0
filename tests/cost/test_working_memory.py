"""Activations and slack by hand; the estimate against peaks that were measured, and the peak of a small run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.cost.device_memory import memory_by_device, memory_of_plan
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.micro_batch import LargestBatch
from plait.cost.working_memory import (
    COMPILING_BYTES,
    CONTEXT,
    CUBLAS,
    GAPS_SHARE,
    IMPORTS_BYTES,
    NCCL,
    PROCESS,
    PROCESS_BYTES,
    Blocks,
    Expected,
    activation_bytes,
    activations_by_kind,
    layer_bytes,
    process_terms,
    slack_rows,
    stage_activations,
)
from plait.recipes.recipe import Recipe
from plait.runtime.prepare import prepare
from tests.cost.smollm2 import SHAPE as SMOLLM2
from tests.cost.test_device_memory import facts_of, named

MIB = 1 << 20


def a_recipe(**keys: object) -> Recipe:
    return Recipe.model_validate({"model": "it", "data": {"source": "x"}, **keys})


def test_the_process() -> None:
    assert PROCESS_BYTES - IMPORTS_BYTES == 256 * 256 * 1024 + 16 * MIB  # kernels that oneDNN and torch keep


def test_a_gpu_has_a_context_and_several_have_a_group_of_all() -> None:
    """Of each of 24 channels 4 MiB of Simple, 4.6875 of LL128, 0.5 of LL. The process itself is in its host's
    memory."""
    assert process_terms("cuda", 1) == {CONTEXT: 544 * MIB, CUBLAS: 3 * 8 * 4 * MIB}, "8 times 4096 KiB, three times"
    assert process_terms("cuda", 8) == {CONTEXT: 544 * MIB, CUBLAS: 96 * MIB, NCCL: int(220.5 * MIB)}
    assert process_terms("cpu", 8) == {PROCESS: PROCESS_BYTES}, "gloo's are small"


def test_what_a_layer_keeps_of_a_token() -> None:
    assert sum(layer_bytes(SMOLLM2, 2, fused=True)) == 2 * (5 * 576 + 2 * 576 + 2 * 192 + 3 * 1536)
    on_gpu = sum(layer_bytes(SMOLLM2, 2, fused=True, by_kernel=True))
    assert on_gpu == 2 * (5 * 576 + 2 * 576 + 2 * 192 + 3 * 1536) + 9 * 4, "a log-sum-exp for each query head"
    windowed = replace(SMOLLM2, windows=(512,) * 30)
    expanded = sum(layer_bytes(windowed, 2, fused=True, by_kernel=True))
    assert expanded == 2 * (5 * 576 + 4 * 576 + 3 * 1536) + 9 * 4, "nine key heads in place of three"
    wide = sum(layer_bytes(SMOLLM2, 4, fused=True, by_kernel=True))
    assert wide == 4 * (5 * 576 + 4 * 576 + 3 * 1536) + 9 * 4, "in float32, too"
    assert sum(layer_bytes(SMOLLM2, 4, fused=False)) == 4 * (4 * 576 + 2 * 576 + 2 * 192 + 4 * 1536) + 8 * 576


def test_checkpointed_activations_are_the_layers_inputs_and_one_layer() -> None:
    batch = LargestBatch.of_groups(2, 3, prompt_tokens=5, response_tokens=7)
    assert (batch.tokens, batch.scores) == (2 * 26, 2 * (25 + 21 * 12))
    one = sum(layer_bytes(SMOLLM2, 2, fused=True))
    whole = activation_bytes(SMOLLM2, batch, Blocks(2, True))
    assert whole == 52 * 30 * one + 30 * 2 * 9 * batch.scores
    by_kernel = activation_bytes(SMOLLM2, batch, Blocks(2, True, by_kernel=True))
    assert by_kernel == 52 * 30 * (one + 9 * 4), "it keeps no scores"
    few = activation_bytes(SMOLLM2, batch, Blocks(2, True, checkpointed=True))
    assert few == 52 * (one + 30 * 576 * 2) + 2 * 9 * batch.scores


@pytest.mark.parametrize("more", [{}, {"checkpointed": True}, {"tp": 2}, {"tp": 2, "splits_tokens": True}])
def test_logits_of_routers_that_are_balanced_stay(more: dict[str, Any]) -> None:
    """30 layers, of which the first 10 are dense: 64 logits of 2 bytes of each token of a mixture, on every rank, also
    of blocks that are computed again."""
    shape = replace(SMOLLM2, experts=64, expert_layers=20, mixtures=tuple(range(10, 30)), expert_intermediate=100)
    batch = LargestBatch.of_groups(2, 3, prompt_tokens=5, response_tokens=7)
    found = [
        activations_by_kind(shape, batch, Blocks(2, True, **more, balanced=balanced)) for balanced in (False, True)
    ]
    (dense, mixture), (balanced_dense, balanced) = found
    assert balanced_dense == dense
    assert balanced == replace(mixture, kept=mixture.kept + 30 * 52 * 64 * 2), "as if all layers were mixtures"
    plain, with_routers = (stage_activations(kinds, (10, 20), 30, 3) for kinds in found)
    assert with_routers - plain == 3 * 20 * 52 * 64 * 2


def test_ranks_of_tp_divide_what_is_inside_the_products_or_all() -> None:
    """Inputs, norms and residuals, and what is added to these, are on each of four ranks, unless tokens are sharded.
    Two of the norms go into products, for which all tokens come together: a layer that is computed again keeps
    these."""
    batch = LargestBatch.of_groups(2, 3, prompt_tokens=5, response_tokens=7)
    between, inside = layer_bytes(SMOLLM2, 2, fused=True)
    assert between == 2 * 5 * 576
    scores = 2 * 9 * batch.scores
    four = activation_bytes(SMOLLM2, batch, Blocks(2, True, tp=4))
    assert four == 52 * 30 * (between + inside // 4) + 30 * scores // 4
    parted = activation_bytes(SMOLLM2, batch, Blocks(2, True, tp=4, splits_tokens=True))
    assert parted == 52 * 30 * ((between + inside) // 4) + 30 * scores // 4
    kept = 2 * 2 * 576 + (2 * 3 * 576 + inside) // 4
    few = activation_bytes(SMOLLM2, batch, Blocks(2, True, checkpointed=True, tp=4, splits_tokens=True))
    assert few == 52 * (kept + 30 * 576 * 2 // 4) + scores // 4


@pytest.mark.parametrize(("groups", "found_mib"), [(4, 541), (8, 1081), (16, 2141)])
def test_activations_that_were_found(groups: int, found_mib: int) -> None:
    """Resident after the forward of SmolLM2-135M in bfloat16 on groups of 101 and 8 x 16 tokens."""
    expected = activation_bytes(SMOLLM2, LargestBatch.of_groups(groups, 8, 101, 16), Blocks(2, True))
    assert expected / MIB == pytest.approx(found_mib, rel=0.04)


def test_slack_by_hand() -> None:
    rows = dict(slack_rows("cpu", Expected(activations=1000, plain=1500, weights=400, working=2000)))
    assert list(rows.values()) == [int(GAPS_SHARE * 1000), 500, COMPILING_BYTES]
    rows = dict(slack_rows("cpu", Expected(activations=0, plain=0, weights=400, working=300)))
    assert rows["reading a model, beyond what a step takes"] == 700 - 300
    widened = dict(slack_rows("cpu", Expected(activations=0, plain=0, weights=0, working=0, widened=77)))
    assert list(widened.values()) == [COMPILING_BYTES, 77]
    on_gpu = slack_rows("cuda", Expected(activations=0, plain=0, weights=400, working=0), moves=True)
    assert dict(on_gpu) == {"buckets of a move": 128 * MIB}


def test_the_demos_peak() -> None:
    """5,466 MiB: two steps of recipes/demo.yaml and an evaluation of 16 items, kernels compiled by the process. Since
    then logits of 16 x 8 x 16 tokens stay for the backward, 192 MiB."""
    steps = {"prompts_per_step": 16, "samples_per_prompt": 8, "sampling": {"max_response_tokens": 16}}
    facts = facts_of(named("colocated", 1), "grpo", options={"kl_coef": 0.01}, **steps)
    (alone,) = memory_by_device(replace(facts, lengths=SampleLengths(Lengths.fixed(101), Lengths.fixed(16))))
    expected = sum(size for _, size in alone.rows) / MIB
    assert expected == pytest.approx(5466 + 192, rel=0.1)
    assert expected + sum(size for _, size in alone.slack) / MIB > 5466 + 192


SCRIPT = """
import re, sys
from plait.cli import main

assert main() == 0
print("peak", re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the peak")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_of_a_small_run(dtype: str, make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """Known texts may take 1 MiB here: all that they may take is counted, which six short steps come nowhere near."""
    texts = {"sampling.draft_pool_bytes": 1 << 20}
    recipe = make_recipe(algorithm="ppo", samples_per_prompt=1, dtype=dtype, steps=6, **texts)
    prepared = prepare(recipe)
    of_run = prepared.flow, prepared.models, prepared.shapes, prepared.plan, prepared.lengths
    (alone,) = memory_of_plan(recipe, *of_run)
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe.model_dump(mode="json", exclude_unset=True)))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "train", str(path)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    (found,) = re.findall(r"^peak (\d+)$", done.stdout, re.MULTILINE)
    peak, expected = int(found) * 1024, sum(size for _, size in alone.rows)
    if "compiling" not in done.stderr:
        assert expected == pytest.approx(peak, rel=0.1)
    assert peak < expected + sum(size for _, size in alone.slack)
