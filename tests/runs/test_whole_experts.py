"""Runs of mixtures whose experts are whole on the ranks of tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.cases import slow_but
from tests.runs.placed_runs import GRPO, where
from tests.runs.plans import assert_equal_runs

MakeRecipe = Callable[..., Recipe]

OF_GRPO = {**GRPO[1], "steps": 2}
FIVE = {"num_experts": 5, "num_local_experts": 5}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": FIVE,
    "gpt_oss": {"intermediate_size": 32},
    "mixtral": {},
    "deepseek_v3": {"n_routed_experts": 5},
}
"""Five experts, which two ranks have as two and three; of gpt_oss, whose plan cuts attention nowhere; in columns."""

TWO = {"actor.generate": "0,1 tp2", "actor.train": "1,0 tp2", "ref.logprobs": "0"}
THREE = {"actor.generate": "0,1 tp2 | 2", "actor.train": "0,1,2 tp3", "ref.logprobs": "0,1 dp2"}
STAGES = {"actor.generate": "0,1,2,3 tp2 pp2", "actor.train": "0,1,2,3 dp2 tp2", "ref.logprobs": "3,2 tp2"}
ROUTED = {"optimizer.router_aux_loss_coef": 0.1, "sampling.router_replay": True}
RUNS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "three": ("qwen3_moe", THREE, {}),
    "two": ("qwen3_moe", TWO, {}),
    "stages": ("qwen3_moe", STAGES, {}),
    "balanced and replayed": ("qwen3_moe", STAGES, ROUTED),
    "adapters": ("qwen3_moe", THREE, {"lora.rank": 2}),
    "drafts": ("qwen3_moe", TWO, {"sampling.speculation": 2}),
    "attention on all ranks": ("gpt_oss", TWO, {}),
    "columns": ("mixtral", TWO, {}),
    "shared experts": ("deepseek_v3", THREE, {}),
}


@pytest.mark.parametrize("name", slow_but(["three"], RUNS))
def test_a_plan_changes_nothing(
    name: str, folders: Callable[[str], Path], place: Path, placed: MakeRecipe, reference: Callable[..., Path]
) -> None:
    """Weights move between layouts of other experts in each step, from training to generation."""
    family, plan, more = RUNS[name]
    keys = OF_GRPO | {"model": str(folders(family))} | more
    recipe = placed("grpo", name, **keys, **where(place, name, plan))
    assert run(recipe).finished
    assert_equal_runs(recipe.run_dir, reference("grpo", **keys))


@pytest.mark.slow
@pytest.mark.parametrize(("begun", "then"), [(TWO, THREE), (THREE, STAGES), (STAGES, None)], ids=["2-3", "3-4", "4-1"])
def test_a_run_goes_on_under_another_plan(
    begun: dict[str, str],
    then: dict[str, str] | None,
    folders: Callable[[str], Path],
    place: Path,
    placed: MakeRecipe,
    reference: Callable[..., Path],
) -> None:
    keys, name = OF_GRPO | {"model": str(folders("qwen3_moe"))}, f"on-{len(begun['actor.train'])}"
    for steps, plan in ((1, begun), (2, then)):
        on = {} if plan is None else where(place, f"{name}-{steps}", plan)
        assert run(placed("grpo", name, **keys | {"steps": steps}, **on), resume=steps > 1).finished
    assert_equal_runs(place / name, reference("grpo", **keys))


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(
    folders: Callable[[str], Path], place: Path, placed: MakeRecipe
) -> None:
    """In bfloat16; engine and trainer agree as near as that dtype does."""
    keys = OF_GRPO | {"model": str(folders("qwen3_moe")), "dtype": "bfloat16"} | where(place, "bits", THREE)
    whole = placed("grpo", "whole", **keys)
    assert run(whole).finished
    for steps in (1, 2):
        assert run(placed("grpo", "stopped", **keys | {"steps": steps}), resume=steps > 1).finished
    finals = [(place / name / "final/model.safetensors").read_bytes() for name in ("whole", "stopped")]
    assert finals[0] == finals[1]
    rows = [row for row in read_rows(whole.run_dir / "metrics.jsonl") if "actor/loss" in row]
    assert all(row["training/rollout_logprobs_diff_max"] < 0.2 for row in rows), rows
