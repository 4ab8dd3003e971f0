"""Runs in float64 that train adapters of experts: by the recipe alone, under plans, and what they leave in files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from plait.errors import UserError
from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.folder.export import export_whole
from plait.runtime.prepare import prepare
from tests.cases import slow_but
from tests.runs.placed_runs import GRPO, where
from tests.runs.plans import assert_equal_runs

peft = pytest.importorskip("peft")

MakeRecipe = Callable[..., Recipe]

LORA = {"rank": 2, "target_modules": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]}
OF_GRPO = {**GRPO[1], "steps": 2, "lora": LORA, "optimizer.learning_rate": 1e-2, "checkpoint.every": 1}
FIVE = {"num_experts": 5, "num_local_experts": 5}
MODELS: dict[str, dict[str, Any]] = {"qwen3_moe": FIVE, "gpt_oss": {"intermediate_size": 32}, "mixtral": {}}
"""Five experts, which two ranks have as two and three; transposed ones; such as are cut in columns."""

TP2 = {"actor.generate": "0,1 tp2", "actor.train": "1,0 tp2", "ref.logprobs": "0"}
PLANS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "dp2": ("qwen3_moe", {"actor.generate": "0 | 1", "actor.train": "0,1 dp2", "ref.logprobs": "0"}, {}),
    "whole experts": ("qwen3_moe", TP2, {}),
    "transposed": ("gpt_oss", TP2, {}),
    "columns": ("mixtral", TP2, {}),
    "pp2": ("qwen3_moe", {"actor.generate": "0,1 pp2", "actor.train": "1,0 pp2", "ref.logprobs": "0"}, {}),
    "moves": ("mixtral", {"actor.generate": "0,1 pp2", "actor.train": "0,1 tp2", "ref.logprobs": "0,1 dp2"}, {}),
    "late": ("qwen3_moe", {"actor.generate": "0", "actor.train": "1", "ref.logprobs": "1"}, {"max_staleness": 1}),
    "parts of the optimizer": (
        "qwen3_moe",
        {"actor.generate": "0,1 tp2", "actor.train": "0,1 dp2", "ref.logprobs": "0"},
        {"optimizer.shard_gradients": True},
    ),
    "prompts apart": (
        "qwen3_moe",
        {"actor.generate prefill": "0", "actor.generate": "1", "actor.train": "0,1 dp2", "ref.logprobs": "0"},
        {},
    ),
    "routers": ("qwen3_moe", TP2, {"optimizer.router_aux_loss_coef": 0.1, "sampling.router_replay": True}),
    "drafts": ("qwen3_moe", TP2, {"sampling.speculation": 2}),
}


def logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.tensor([[5, 9, 40, 7, 61]])).logits.log_softmax(-1)


@pytest.mark.parametrize("family", slow_but(["qwen3_moe"], ["qwen3_moe", "gpt_oss"]))
def test_adapters_of_experts_are_trained_and_go_on_to_the_bit(
    family: str, folders: Callable[[str], Path], place: Path, placed: MakeRecipe, reference: Callable[..., Path]
) -> None:
    """What is drawn is what is trained; both A and B learn; peft computes with the folder what Transformers does with
    the model that is exported."""
    keys = OF_GRPO | {"model": str(folders(family))}
    whole = reference("grpo", **keys)
    rows = [row for row in read_rows(whole / "metrics.jsonl") if "actor/loss" in row]
    assert len(rows) == 2
    assert all(row["training/rollout_logprobs_diff_max"] < 1e-9 for row in rows), rows
    for steps in (1, 2):
        assert run(placed("grpo", f"stopped-{family}", **keys | {"steps": steps}), resume=steps > 1).finished
    name = "adapter_model.safetensors"
    assert (whole / "final" / name).read_bytes() == (place / f"stopped-{family}" / "final" / name).read_bytes()
    stored = load_file(whole / "final" / name)
    of_experts = [key for key in stored if ".experts." in key and ".lora_B." in key]
    assert len(of_experts) == 2 * 2
    assert all(stored[key].abs().max() > 0 for key in of_experts)
    base = AutoModelForCausalLM.from_pretrained(folders(family), dtype=torch.float64)
    base.set_experts_implementation("eager")
    before = logprobs(base)
    after = logprobs(peft.PeftModel.from_pretrained(base, whole / "final"))
    assert (after - before).abs().max() > 1e-4
    export_whole(whole, out := place / f"exported-{family}")
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64)
    merged.set_experts_implementation("eager")
    torch.testing.assert_close(logprobs(merged), after, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_a_run_begins_as_an_adapter_of_experts(
    folders: Callable[[str], Path], placed: MakeRecipe, reference: Callable[..., Path]
) -> None:
    """The reference is the base with a frozen copy of it. A run of other experts than it has is refused."""
    begun = reference("grpo", **OF_GRPO, model=str(folders("qwen3_moe"))) / "final"
    keys = OF_GRPO | {"model": str(begun), "steps": 1, "options": {"kl_coef": 0.05}}
    recipe = placed("grpo", "goes on", **keys)
    assert run(recipe).finished
    (row,) = (row for row in read_rows(recipe.run_dir / "metrics.jsonl") if "actor/loss" in row)
    assert row["training/rollout_logprobs_diff_max"] < 1e-9
    assert row["kl"] == pytest.approx(0, abs=1e-9)
    own, before = (load_file(at / "adapter_model.safetensors") for at in (recipe.run_dir / "final", begun))
    assert own.keys() == before.keys()
    assert any(not torch.equal(own[name], before[name]) for name in own if ".experts." in name)
    fewer = {"lora": LORA | {"target_modules": ["q_proj", "experts.down_proj"]}}
    said = r"has `lora.target_modules` \[experts.down_proj, experts.gate_up_proj, q_proj\], but the recipe has \[exp"
    with pytest.raises(UserError, match=said):
        prepare(placed("grpo", "of fewer", **keys | fewer))


def test_a_model_without_such_experts_is_refused(placed: MakeRecipe, folders: Callable[[str], Path]) -> None:
    with pytest.raises(UserError, match=r"^lora\.target_modules: .*names among .*q_proj.*, found experts\.down_proj"):
        prepare(placed("grpo", "dense", lora={"rank": 2, "target_modules": ["experts.down_proj"]}))
    wrong = {"model": str(folders("mixtral")), "lora": {"rank": 2, "target_modules": ["experts.w1"]}}
    with pytest.raises(UserError, match=r"names among experts\.down_proj, experts\.gate_up_proj, .*found experts\.w1"):
        prepare(placed("grpo", "unknown", **wrong))


@pytest.mark.parametrize("name", slow_but(["columns"], PLANS))
def test_a_plan_changes_nothing(
    name: str, folders: Callable[[str], Path], place: Path, placed: MakeRecipe, reference: Callable[..., Path]
) -> None:
    family, plan, more = PLANS[name]
    keys = OF_GRPO | {"model": str(folders(family))} | more
    recipe = placed("grpo", name, **keys, **where(place, name, plan))
    assert run(recipe).finished
    assert_equal_runs(recipe.run_dir, reference("grpo", **keys))
