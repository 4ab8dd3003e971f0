"""Roles may begin as a folder that holds a LoRA adapter alone: with `lora` it is trained on, beside a frozen copy of it
as the reference; without, it is merged into the weights that are trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from plait.errors import UserError
from plait.layout.decoder import HEAD
from plait.models.files.saving import save_pretrained
from plait.models.language_model import LanguageModel
from plait.models.loading import load_model, load_scalar, merged
from plait.models.lora import add_lora
from plait.models.lora_files import save_adapter
from plait.models.lora_settings import LoraSettings
from plait.recipes.recipe import Recipe
from plait.runtime.api import evaluate_model, run
from plait.runtime.folder.export import export_whole
from plait.runtime.prepare import prepare
from plait.workers.loading import build_models
from tests.runs.test_resume import kill_in_step
from tests.runs.written import logged

pytest.importorskip("peft")

MakeRecipe = Callable[..., Recipe]
LORA = {"rank": 2, "target_modules": ["q_proj", "v_proj"]}


def stirred(view: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in view.own.parameters.values():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    return view


def save_on(base: Path, view: Any, folder: Path) -> Path:
    save_adapter(stirred(view), folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))
    return folder


@pytest.fixture
def adapter(tiny_folder: Path, tmp_path: Path) -> Path:
    """Of a language model, with a B that is not 0."""
    base = load_model(str(tiny_folder), dtype="float32")
    return save_on(tiny_folder, add_lora(base, LoraSettings(**LORA), name="sft", seed=0), tmp_path / "adapter")


@pytest.fixture
def judge(tiny_folder: Path, tmp_path: Path) -> Path:
    """Of a reward model, with its head."""
    base = load_scalar(str(tiny_folder), dtype="float32")
    return save_on(tiny_folder, add_lora(base, LoraSettings(rank=3), name="reward", seed=0), tmp_path / "judge")


@pytest.fixture
def unlike(tmp_path: Path) -> str:
    """A reward that tells any two answers apart."""
    text = "def unlike(completions, **_):\n    return [sum(map(ord, c)) % 7 for c in completions]\n"
    (tmp_path / "unlike.py").write_text(text)
    return f"{tmp_path}/unlike.py:unlike"


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def test_an_adapted_run_goes_on_with_an_adapter(
    make_recipe: MakeRecipe, adapter: Path, tiny_folder: Path, unlike: str
) -> None:
    keys = {"optimizer.learning_rate": 1e-2, "reward.functions": [unlike]}
    recipe = make_recipe(model=str(adapter), lora=LORA, **keys)
    models = build_models(prepare(recipe).models, recipe)
    assert set(models) == {"actor", "ref"}
    assert models["actor"].weights.data_ptr() == models["ref"].weights.data_ptr(), "one base under both"
    begun = stored(adapter)
    for model in models.values():
        own = {f"base_model.model.{name}": param for name, param in model.own.parameters.items()}
        assert own.keys() == begun.keys()
        assert all(torch.equal(own[name], begun[name]) for name in begun)
    run(recipe)
    rows = logged(recipe)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6), "the reference is the base with the adapter"
    assert rows[-1]["kl"] > 0
    final = recipe.run_dir / "final"
    ended = stored(final)
    assert ended.keys() == begun.keys()
    assert any(not torch.equal(ended[name], begun[name]) for name in begun)
    assert json.loads((final / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny_folder)
    assert evaluate_model(recipe.model_copy(update={"model": str(final), "evaluation": _two_items(recipe)})).samples


@pytest.mark.process
@pytest.mark.parametrize("cut", ["tp", "pp"])
def test_parts_begin_as_the_adapter_does(
    make_recipe: MakeRecipe, adapter: Path, tmp_path: Path, unlike: str, cut: str
) -> None:
    """Two devices, each with a part of the base and of the adapter, trained and frozen, end as one does."""
    modes = {"actor.train": "train", "actor.generate": "decode", "ref.logprobs": "score"}
    placements = [{"call": call, "mode": mode, "ranks": [0, 1], cut: 2} for call, mode in modes.items()]
    plan = {"format": "plait-plan", "version": 1, "name": cut, "num_ranks": 2, "placements": placements}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    keys = {"dtype": "float64", "optimizer.learning_rate": 1e-2, "reward.functions": [unlike], "lora": LORA}
    one = make_recipe(model=str(adapter), run_dir=str(tmp_path / "one"), **keys)
    places = {"devices": 2, "plan": str(tmp_path / "plan.json"), "run_dir": str(tmp_path / "two")}
    two = make_recipe(model=str(adapter), **keys, **places)
    for recipe in (one, two):
        run(recipe)
    assert [row["kl"] for row in logged(two)] == pytest.approx([row["kl"] for row in logged(one)], abs=1e-9)
    expected, found = (stored(recipe.run_dir / "final") for recipe in (one, two))
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-9)


def test_a_run_from_an_adapter_goes_on_and_is_exported(
    make_recipe: MakeRecipe, adapter: Path, tmp_path: Path, unlike: str
) -> None:
    keys = {"checkpoint.every": 1, "model": str(adapter), "lora": LORA, "reward.functions": [unlike]}
    whole, killed = (make_recipe(run_dir=str(tmp_path / name), **keys) for name in ("whole", "killed"))
    run(whole)
    kill_in_step(killed, 1)
    assert run(killed, resume=True).finished
    ends = [stored(recipe.run_dir / "final") for recipe in (killed, whole)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])
    export_whole(whole.run_dir, tmp_path / "out")
    exported = load_model(str(tmp_path / "out"), dtype="float32")
    final = load_model(str(whole.run_dir / "final"), dtype="float32", adapt=merged)
    assert torch.equal(exported.weights, final.weights)


def _two_items(recipe: Recipe) -> Any:
    return recipe.evaluation.model_copy(update={"items": 2})


def test_without_lora_an_adapter_is_merged_into_the_weights(
    make_recipe: MakeRecipe, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_pretrained(load_model(str(adapter), dtype="float32"), tmp_path / "merged")
    recipes = [
        make_recipe(model=str(name), run_dir=str(tmp_path / f"run{at}"))
        for at, name in enumerate((adapter, tmp_path / "merged"))
    ]
    merged, whole = (build_models(prepare(recipe).models, recipe) for recipe in recipes)
    for role, model in merged.items():
        assert isinstance(model, LanguageModel)
        assert model.own is None
        assert torch.equal(model.weights, whole[role].weights)
    for recipe in recipes:
        run(recipe)
    assert [row["actor/loss"] for row in logged(recipes[0])] == [row["actor/loss"] for row in logged(recipes[1])]
    assert (recipes[0].run_dir / "final" / "model.safetensors").is_file()


@pytest.mark.parametrize("lora", [LORA, {"rank": 0}])
def test_a_critic_begins_as_an_adapter_with_a_new_head(
    make_recipe: MakeRecipe, adapter: Path, lora: dict[str, Any]
) -> None:
    recipe = make_recipe(model=str(adapter), lora=lora, algorithm="ppo", options={}, samples_per_prompt=1)
    models = build_models(prepare(recipe).models, recipe)
    critic = models["critic"]
    assert critic.trained.parameter(HEAD).abs().max() == 0
    if lora["rank"]:
        name = "model.layers.0.self_attn.q_proj.lora_B.weight"
        assert torch.equal(critic.own.parameters[name], stored(adapter)[f"base_model.model.{name}"])
    else:
        decoder = dict(models["actor"].module.base_model.named_parameters())
        for name, param in critic.module.base_model.named_parameters():
            assert torch.equal(param, decoder[name])


@pytest.mark.parametrize("lora", [{"rank": 4}, {"rank": 0}])
def test_a_reward_model_that_is_an_adapter_scores(make_recipe: MakeRecipe, judge: Path, lora: dict[str, Any]) -> None:
    keys = {"reward.functions": [], "reward.model": str(judge), "steps": 1}
    recipe = make_recipe(lora=lora, **keys)
    reward = build_models(prepare(recipe).models, recipe)["reward"]
    assert torch.equal(reward.module.score.weight, stored(judge)[f"base_model.model.{HEAD}"])
    assert run(recipe).finished


def test_a_score_is_read_before_a_padding_token_that_ends_sequences(judge: Path) -> None:
    """As TRL leaves it, whose class reads the score at the last token that is not the padding token."""
    assert load_scalar(str(judge), dtype="float32").passed_token_id is None
    config = json.loads((judge / "tokenizer_config.json").read_text())
    (judge / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": config["eos_token"]}))
    theirs = load_scalar(str(judge), dtype="float32")
    assert theirs.passed_token_id == theirs.tokenizer.eos_token_id
    assert theirs.passed_token_id in theirs.eos_token_ids


def test_an_adapter_of_a_reward_model_speaks_not(make_recipe: MakeRecipe, judge: Path) -> None:
    with pytest.raises(UserError, match=r"key `model`: `.*judge` is a reward model \(.*ForSequenceClassification\)"):
        prepare(make_recipe(model=str(judge)))


def test_an_adapter_of_a_language_model_scores_not(make_recipe: MakeRecipe, adapter: Path) -> None:
    keys = {"reward.functions": [], "reward.model": str(adapter), "algorithm": "ppo", "options": {}}
    with pytest.raises(UserError, match=r"key `reward.model`: `.*adapter` is a language model .* without a head"):
        prepare(make_recipe(samples_per_prompt=1, **keys))


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({**LORA, "rank": 4}, r"has `lora.rank` 2, but the recipe has 4; set `lora.rank` to 2"),
        ({**LORA, "alpha": 2}, r"has `lora.alpha` 4, but the recipe has 2; set `lora.alpha` to 4"),
        ({"rank": 2}, r"has `lora.target_modules` \[q_proj, v_proj\], but the recipe has \[.*up_proj.*"),
        ({**LORA, "target_modules": ["q_proj"]}, r"set `lora.target_modules` to \[q_proj, v_proj\]"),
    ],
)
def test_other_settings_than_those_of_the_adapter_are_refused(
    make_recipe: MakeRecipe, adapter: Path, lora: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said) as raised:
        prepare(make_recipe(model=str(adapter), lora=lora))
    assert "`lora` out: the adapter is then merged into the weights" in str(raised.value)
