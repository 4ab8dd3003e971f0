"""Recipes of runs that have begun, which rules of later are not held against, and of stages that share keys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from plait.algorithms.grpo import GRPOOptions
from plait.errors import ConfigError
from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import load_recipe
from plait.recipes.stages import load_stages
from plait.recipes.trust import user_recipe
from plait.runtime.folder.claim import RESUMABLE_KEYS, claim
from plait.runtime.folder.stored_recipe import as_begun, changed_keys, read_stored, recipe_text
from plait.runtime.inputs.keys_from_python import flattened
from plait.runtime.prepare import outline

KEYS: dict[str, Any] = {
    "model": "llama-7b",
    "data.source": "d.jsonl",
    "dtype": "bfloat16",
    "options": {"kl_in": "reward", "overlong_penalty": 2.0},
    "reward": {"functions": ["math:floor"], "answer": "line"},
    "evaluation.every": 20,
    "lora.alpha": 32.0,
}
SAYS = {
    "options": "kl_in is set, but has no effect without kl_coef",
    "reward": "`reward.answer` is set, but neither",
    "evaluation.every": "every is set, but has no effect without items",
    "lora.alpha": "alpha is set, but has no effect without rank",
}


@pytest.mark.parametrize("key", SAYS)
def test_a_run_goes_on_with_keys_without_effect_that_none_begins_with(key: str, tmp_path: Path) -> None:
    keys = {name: value for name, value in KEYS.items() if name not in SAYS or name == key}
    recipe = load_recipe(None, [*({"reward.functions": ["math:floor"]} | keys).items(), ("run_dir", str(tmp_path))])
    with pytest.raises(ConfigError, match=SAYS[key]):
        outline(recipe)
    stored = tmp_path / "recipe.yaml"
    stored.write_text(recipe_text(recipe))
    (tmp_path / "run.lock").touch()
    claim(recipe, resume=True).close()
    outline(as_begun(stored, recipe))
    outline(user_recipe(stored, (), trust_run_code=True))


ON_A_GPU: dict[str, Any] = {
    **{name: value for name, value in KEYS.items() if name not in SAYS},
    "reward.functions": ["math:floor"],
    "device": "cuda",
}


def on_a_gpu(run_dir: Path, **stated: Any) -> Recipe:
    keys = ON_A_GPU | {"run_dir": str(run_dir)} | {key.replace("__", "."): value for key, value in stated.items()}
    return load_recipe(None, list(keys.items()))


def test_how_many_samples_run_on_a_gpu_is_kept_and_a_run_of_before_goes_on_with_fewer(tmp_path: Path) -> None:
    """All ran 64 at a time once, and their recipes say so as if their users did."""
    recipe, stored = on_a_gpu(tmp_path), tmp_path / "recipe.yaml"
    begun = outline(recipe, device_memory=80 << 30).recipe
    stored.write_text(recipe_text(begun))
    assert yaml.safe_load(stored.read_text())["sampling"]["max_running"] == 256
    assert changed_keys(stored, begun) == {}
    stored.write_text(stored.read_text().replace("max_running: 256", "max_running: 64"))
    assert outline(as_begun(stored, recipe), device_memory=80 << 30).recipe.sampling.max_running == 64
    assert outline(load_recipe(stored), device_memory=80 << 30).recipe.sampling.max_running == 64
    assert "sampling.max_running" not in changed_keys(stored, recipe)
    stated = on_a_gpu(tmp_path, sampling__max_running=256)
    assert changed_keys(stored, stated)["sampling.max_running"] == (64, 256), "the user says so"
    assert outline(as_begun(stored, stated), device_memory=80 << 30).recipe.sampling.max_running == 256


def test_samples_that_are_kept_over_an_update_are_no_more_than_have_room(tmp_path: Path) -> None:
    """0.3 of 24 GiB are 921 blocks of 16 tokens of 512 KiB; 200 tokens take 13 blocks."""
    kept = {"partial_rollout": "keep", "max_staleness": 1, "data__max_prompt_tokens": 100}
    keys = kept | {"sampling__max_response_tokens": 100}
    assert outline(on_a_gpu(tmp_path, **keys), device_memory=24 << 30).recipe.sampling.max_running == 70
    assert outline(on_a_gpu(tmp_path, **keys), device_memory=240 << 30).recipe.sampling.max_running == 256
    with pytest.raises(ConfigError, match=r"`sampling\.max_running` \(71\) samples of 200 tokens take"):
        outline(on_a_gpu(tmp_path, **keys, sampling__max_running=71), device_memory=24 << 30)


def test_what_memory_is_spent_on_is_kept_and_a_run_of_before_goes_on_as_it_was(tmp_path: Path) -> None:
    """It may have begun on another GPU."""
    recipe, stored = on_a_gpu(tmp_path), tmp_path / "recipe.yaml"
    begun = recipe.model_copy(update={"micro_batch_tokens": 8192, "checkpoint_activations": False})
    stored.write_text(recipe_text(begun))
    assert changed_keys(stored, recipe) == {}
    again = as_begun(stored, recipe)
    assert (again.micro_batch_tokens, again.checkpoint_activations) == (8192, False)
    assert again.states("micro_batch_tokens")
    assert again.states("checkpoint_activations")
    stated = on_a_gpu(tmp_path, micro_batch_tokens=4096)
    assert changed_keys(stored, stated) == {"micro_batch_tokens": (8192, 4096)}, "the user says so"
    assert as_begun(stored, stated).checkpoint_activations is False
    assert set(changed_keys(stored, stated)) <= RESUMABLE_KEYS, "a forecast may have been too good"
    fewer = on_a_gpu(tmp_path, devices=2)
    assert not as_begun(stored, fewer).states("micro_batch_tokens"), "others are found for other devices"
    assert set(changed_keys(stored, fewer)) <= RESUMABLE_KEYS


def test_what_ranks_divide_may_change_with_the_plan(tmp_path: Path) -> None:
    """A plan that cannot divide it says to set the key."""
    keys = {name: value for name, value in KEYS.items() if name not in SAYS} | {"reward.functions": ["math:floor"]}
    divides = {
        "sequence_parallel": True,
        "optimizer.shard_gradients": True,
        "critic.optimizer.shard_gradients": True,
        "cost_critic.optimizer.shard_gradients": True,
    }
    began, plain = ([*(keys | more).items(), ("run_dir", str(tmp_path))] for more in (divides, {}))
    (tmp_path / "recipe.yaml").write_text(recipe_text(load_recipe(None, began)))
    (tmp_path / "run.lock").touch()
    assert changed_keys(tmp_path / "recipe.yaml", load_recipe(None, plain)).keys() == divides.keys()
    claim(load_recipe(None, plain), resume=True).close()


def test_keys_that_there_are_no_more_are_named_with_the_way_on(tmp_path: Path) -> None:
    """Keys that there were not yet are as by default: neither is the user's to give `as it was`."""
    keys = {name: value for name, value in KEYS.items() if name not in SAYS} | {"reward.functions": ["math:floor"]}
    recipe = load_recipe(None, [*keys.items(), ("run_dir", str(tmp_path))])
    tree = yaml.safe_load(recipe_text(recipe))
    tree |= {"once": 3, "sampling": {**tree["sampling"], "gone": True}}
    del tree["doctor"]["kl"], tree["restarts"]
    (tmp_path / "run.lock").touch()
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    saved = tmp_path / "checkpoints/step-1"
    saved.mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"was begun with `once`, `sampling\.gone`, which this version .* not have; go on w"
    ):
        claim(recipe, resume=True)
    saved.rmdir()
    with claim(recipe, resume=True) as directory:
        assert not directory.begun, "nothing is lost where no step was ever saved"
    del tree["once"], tree["sampling"]["gone"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    claim(recipe, resume=True).close()


def test_a_run_whose_recipe_cannot_be_read_is_let_go_of(tmp_path: Path) -> None:
    """A second try in the same process, a notebook, is told the same: not that the first one works there."""
    stored, recipe = tmp_path / "recipe.yaml", load_recipe(None, [*KEYS.items(), ("run_dir", str(tmp_path))])
    stored.write_text("steps: [")
    (tmp_path / "run.lock").touch()
    (tmp_path / "checkpoints/step-1").mkdir(parents=True)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"recipe\.yaml"):
            claim(recipe, resume=True)
    stored.write_text(recipe_text(recipe))
    claim(recipe, resume=True).close()


STAGES = """
model: llama-7b
data: {source: d.jsonl}
reward: {functions: [math:floor], answer: line}
options: {kl_in: reward}
evaluation: {every: 20}
lora: {alpha: 32}
stages:
  first: {}
  second: {evaluation: {items: 200}, lora: {rank: 8}, options: {kl_coef: 0.1}, reward: {functions: task}}
"""


def test_a_key_beside_the_stages_may_be_for_one_of_them(tmp_path: Path) -> None:
    path = tmp_path / "stages.yaml"
    path.write_text(STAGES)
    outline(load_stages(path).foreseen("first"))
    path.write_text(STAGES.replace("lora: {alpha: 32}\n", "").replace("first: {}", "first: {lora: {alpha: 16}}"))
    with pytest.raises(ConfigError, match=SAYS["lora.alpha"]):
        outline(load_stages(path).foreseen("first"))


@dataclass
class Mine:
    weight: float


def test_options_given_with_an_algorithm_take_the_place_of_a_files(tmp_path: Path) -> None:
    path = tmp_path / "ppo.yaml"
    path.write_text("model: m\ndata: {source: d}\nalgorithm: ppo\noptions: {gamma: 0.9}\n")
    options = {"kl_coef": 0.1}
    assert load_recipe(path, flattened("options", options)).options == {"gamma": 0.9, "kl_coef": 0.1}
    assert load_recipe(path, flattened("options", options, replaces=True)).options == options
    assert flattened("options", GRPOOptions(kl_coef=0.1)) == [("options.kl_coef", 0.1)]
    assert flattened("options", Mine(0.5), replaces=True) == [("options", {"weight": 0.5})]
    of_stage = flattened("policy", {"algorithm": "grpo", "options": options})
    assert of_stage == [("policy.algorithm", "grpo"), ("policy.options", options)]


def test_the_recipe_of_an_earlier_version_has_the_names_of_today(tmp_path: Path) -> None:
    """A folder that an earlier version began is resumed by a recipe with today's keys; other values are still told."""
    keys = {name: value for name, value in KEYS.items() if name not in SAYS} | {
        "turns.reply": "math:floor",
        "turns.max_turns": 3,
        "reward.max_concurrency": 4,
        "reward.functions": ["math:floor"],
        "max_staleness": 1,
        "run_dir": str(tmp_path),
    }
    recipe = load_recipe(None, [*keys.items()])
    tree = yaml.safe_load(recipe_text(recipe))
    for section, name, old in (
        ("turns", "max_turns", "most"),
        ("turns", "max_concurrency", "at_once"),
        ("reward", "max_concurrency", "at_once"),
        ("cost", "max_concurrency", "at_once"),
    ):
        if isinstance(tree.get(section), dict):
            tree[section][old] = tree[section].pop(name)
    assert tree.pop("partial_rollout") == "off"
    tree["on_update"] = "wait"
    stored = tmp_path / "recipe.yaml"
    stored.write_text(yaml.safe_dump(tree))
    (tmp_path / "run.lock").touch()
    assert changed_keys(stored, recipe) == {}
    assert read_stored(stored) == recipe
    claim(recipe, resume=True).close()
    other = load_recipe(None, [*(keys | {"partial_rollout": "keep", "turns.max_turns": 2}).items()])
    assert changed_keys(stored, other) == {"partial_rollout": ("off", "keep"), "turns.max_turns": (3, 2)}
