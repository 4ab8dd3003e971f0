"""Runs of models with recurrent layers beside those that attend."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from plait.errors import ConfigError, UserError
from plait.models.mixer_shape import KEEPS_STATE
from plait.observe.run_log import read_rows
from plait.recipes.engine_checks import none_by_layers
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.prepare import prepare
from tests.cases import slow_but
from tests.models.tiny import save_tiny
from tests.runs.placed_runs import FUSED_PPO, GRPO, where
from tests.runs.plan_files import write_plan
from tests.runs.plans import assert_equal_runs

MakeRecipe = Callable[..., Recipe]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "it", family="qwen3_5_text", weight_scale=0.05)


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def of_pairs(make_recipe: MakeRecipe, folder: Path, tmp_path: Path, **keys: Any) -> Recipe:
    rows = [
        {"prompt": f"what is {i} plus 4?", "chosen": f"it is {i + 4}.", "rejected": "a quick brown fox"}
        for i in range(8)
    ]
    given = {"model": str(folder), "algorithm": "dpo", "options": {}, "reward.functions": [], "sampling": {}}
    given |= {"samples_per_prompt": 8, "optimizer.learning_rate": 3e-3}
    given |= {"data.source": written(tmp_path / "pairs.jsonl", rows), "dtype": "float64", "prompts_per_step": 4}
    return make_recipe(**{**given, **keys})


def test_a_run_over_pairs_learns_and_is_read_by_transformers(
    make_recipe: MakeRecipe, folder: Path, tmp_path: Path
) -> None:
    recipe = of_pairs(make_recipe, folder, tmp_path, steps=3, dtype="float32", checkpoint_activations=True)
    run(recipe)
    rows = [json.loads(line) for line in (recipe.run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [row["actor/loss"] for row in rows if "actor/loss" in row]
    assert losses[-1] < losses[0], losses
    before, after = (
        AutoModelForCausalLM.from_pretrained(where, dtype="float32") for where in (folder, recipe.run_dir / "final")
    )
    names = dict(after.named_parameters())
    moved = {name for name, param in before.named_parameters() if not torch.equal(param, names[name])}
    assert {"model.layers.0.linear_attn.A_log", "model.layers.0.linear_attn.conv1d.weight"} <= moved


@pytest.mark.slow
def test_two_devices_train_as_one(make_recipe: MakeRecipe, folder: Path, tmp_path: Path) -> None:
    finals = []
    for devices in (1, 2):
        recipe = of_pairs(make_recipe, folder, tmp_path, run_dir=str(tmp_path / f"of{devices}"), devices=devices)
        run(recipe)
        finals.append(AutoModelForCausalLM.from_pretrained(recipe.run_dir / "final", dtype="float64").state_dict())
    for name, one in finals[0].items():
        torch.testing.assert_close(one, finals[1][name], rtol=0, atol=1e-9)


OF_GRPO = {**GRPO[1], "steps": 2}
MOVED = {"actor.generate": "0,1 pp2", "actor.train": "0,1 tp2", "ref.logprobs": "1,0 dp2"}
OTHERS = {"actor.generate": "0,1 tp2", "actor.train": "1,0 pp2", "ref.logprobs": "1,0 tp2"}
FOUR = {"actor.generate": "0,1 tp2 | 2 | 3", "actor.train": "0,1,2,3 dp2 pp2", "ref.logprobs": "0,1,2,3 tp2 pp2"}
PLANS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "stages": ("qwen3_5_text", {"actor.generate": "0,1 pp2", "actor.train": "1,0 pp2", "ref.logprobs": "0,1 dp2"}, {}),
    "four": ("qwen3_5_text", FOUR, {}),
    "sharded tokens": ("qwen3_5_text", MOVED, {"sequence_parallel": True}),
    "adapters": ("qwen3_5_text", MOVED, {"lora.rank": 2}),
    "a stage without adapters": ("qwen3_5_text", OTHERS, {"lora.rank": 2, "lora.target_modules": ["q_proj", "v_proj"]}),
}
PLANNED = ("qwen3_5_text", "qwen3_next", "olmo_hybrid", "lfm2")
PLANNED += ("bamba", "granitemoehybrid", "falcon_h1", "nemotron_h")
PLANS |= {f"{family} moved": (family, MOVED, {}) for family in PLANNED}
PLANS |= {f"{family} others": (family, OTHERS, {}) for family in PLANNED}


@pytest.mark.parametrize("name", slow_but(["qwen3_5_text moved"], PLANS))
def test_a_plan_changes_nothing(
    name: str, folders: Callable[[str], Path], place: Path, placed: MakeRecipe, reference: Callable[..., Path]
) -> None:
    family, plan, more = PLANS[name]
    keys = OF_GRPO | {"model": str(folders(family))} | {key: value for key, value in more.items() if "lora" in key}
    recipe = placed("grpo", name, **keys | more, **where(place, name, plan))
    assert run(recipe).finished
    assert_equal_runs(recipe.run_dir, reference("grpo", **keys))


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["pp2", "tp2"])
def test_samples_move_between_instances_that_are_cut_and_such_as_are_whole(
    cut: str, folder: Path, place: Path, placed: MakeRecipe, reference: Callable[..., Path]
) -> None:
    """They are computed again where they come to."""
    (flow, keys), scores = FUSED_PPO, ("ref.logprobs", "critic.train", "critic.values", "reward.score", "actor.train")
    keys, name = keys | {"model": str(folder), "steps": 2}, f"fused-{cut}"
    plan = {"actor.generate": f"0,1 {cut} | 2"} | dict.fromkeys(scores, "0,1,2 dp3") | {"critic.train": f"0,1 {cut}"}
    recipe = placed(flow, name, **keys, **where(place, name, plan))
    assert run(recipe).finished
    assert_equal_runs(recipe.run_dir, reference(flow, **keys))
    assert sum(row.get("perf/samples_moved", 0) for row in read_rows(recipe.run_dir / "metrics.jsonl")) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("begun", "then"), [(MOVED, OTHERS), (OTHERS, MOVED)], ids=["tp then pp", "pp then tp"])
def test_a_run_goes_on_under_another_plan(
    begun: dict[str, str],
    then: dict[str, str],
    folder: Path,
    place: Path,
    placed: MakeRecipe,
    reference: Callable[..., Path],
) -> None:
    keys, name = OF_GRPO | {"model": str(folder)}, f"on-{begun['actor.train'][-3:]}"
    for steps, plan in ((1, begun), (2, then)):
        recipe = placed("grpo", name, **keys | {"steps": steps}, **where(place, f"{name}-{steps}", plan))
        assert run(recipe, resume=steps > 1).finished
    assert_equal_runs(place / name, reference("grpo", **keys))


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(folder: Path, place: Path, placed: MakeRecipe) -> None:
    """In bfloat16; engine and trainer agree as near as that dtype does."""
    keys = OF_GRPO | {"model": str(folder), "dtype": "bfloat16"} | where(place, "bits", MOVED)
    whole = placed("grpo", "whole", **keys)
    assert run(whole).finished
    for steps in (1, 2):
        assert run(placed("grpo", "stopped", **keys | {"steps": steps}), resume=steps > 1).finished
    finals = [(place / name / "final/model.safetensors").read_bytes() for name in ("whole", "stopped")]
    assert finals[0] == finals[1]
    rows = [row for row in read_rows(whole.run_dir / "metrics.jsonl") if "actor/loss" in row]
    assert all(row["training/rollout_logprobs_diff_max"] < 0.2 for row in rows), rows


def test_samples_are_drawn_by_what_trains(make_recipe: MakeRecipe, folder: Path, tmp_path: Path) -> None:
    """On one device and on two; the run itself compares the log-probs of both."""
    finals = []
    for devices in (1, 2):
        of_run = {"run_dir": str(tmp_path / f"of{devices}"), "devices": devices, "plan": "colocated"}
        recipe = make_recipe(model=str(folder), dtype="float64", **of_run, **{"sampling.max_response_tokens": 24})
        run(recipe)
        rows = [json.loads(line) for line in (recipe.run_dir / "metrics.jsonl").read_text().splitlines()]
        assert all(row["training/rollout_logprobs_diff_max"] < 1e-6 for row in rows if "actor/loss" in row)
        assert any(row.get("actor/grad_norm") for row in rows), "some group has rewards that differ"
        finals.append(AutoModelForCausalLM.from_pretrained(recipe.run_dir / "final", dtype="float64").state_dict())
    for name, one in finals[0].items():
        torch.testing.assert_close(one, finals[1][name], rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sampling.speculation", 4),
        ("sampling.speculation", "adaptive"),
        ("sampling.prefix_cache_tokens", 160),
        ("rebalance", "auto"),
    ],
)
def test_what_states_cannot_do_is_refused_by_name(make_recipe: MakeRecipe, folder: Path, key: str, value: Any) -> None:
    recipe = make_recipe(model=str(folder), **{key: value})
    with pytest.raises(ConfigError, match=rf"^`{key}` is {value}, but 2 of the 3 layers of .* are recurrent"):
        prepare(recipe)
    assert prepare(make_recipe(model=str(folder))).recipe.sampling.speculation == "off"


def test_a_person_is_told_why_nothing_is_drafted() -> None:
    said = none_by_layers("--speculation", KEEPS_STATE)
    why = "states of its recurrent layers cannot be rolled back where draft tokens are rejected"
    assert said == f"none by `--speculation` auto, as {why}", "and not that `adaptive` would"
    assert none_by_layers("it", "it has a part of the model").endswith("`adaptive` drafts all the same")


def test_samples_that_stand_still_between_versions_are_refused(make_recipe: MakeRecipe, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^`partial_rollout` is keep, but 2 of the 3 .*set it to recompute"):
        prepare(make_recipe(model=str(folder), partial_rollout="keep", max_staleness=1))


def test_a_draft_model_must_keep_none(make_recipe: MakeRecipe, folder: Path, tiny_folder: Path) -> None:
    for model, drafts in ((folder, tiny_folder), (tiny_folder, folder)):
        recipe = make_recipe(model=str(model), **{"sampling.draft_model": str(drafts)})
        with pytest.raises(ConfigError, match=r"`sampling\.draft_model`.* are recurrent"):
            prepare(recipe)


def test_more_parts_than_key_heads_are_refused(make_recipe: MakeRecipe, folder: Path, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "it", {"actor.train": "0,1,2,3 tp4", "ref.logprobs": "0"})
    recipe = of_pairs(make_recipe, folder, tmp_path, plan=str(plan))
    with pytest.raises(UserError, match=r"tp: expected at most 2, the key heads or groups .*, found 4"):
        prepare(recipe)


def test_prompts_computed_elsewhere_are_refused(make_recipe: MakeRecipe, folder: Path, tmp_path: Path) -> None:
    places = {"actor.generate prefill": "0", "actor.generate": "1", "actor.train": "0", "ref.logprobs": "0"}
    recipe = make_recipe(model=str(folder), plan=str(write_plan(tmp_path, "it", places)))
    with pytest.raises(ConfigError, match=r"computes its prompts on other ranks .*leave prefill out"):
        prepare(recipe)
