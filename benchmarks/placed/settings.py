"""Settings of the shipped recipes, recipes/demo.yaml and recipes/film.yaml: their data, rewards and lengths, and of
each setting what varies. Of the film's stages it is the one with four models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from random_llama import word_tokenizer, write_llama

from placed.recipes import write_reward_model
from plait.models.files import hub
from plait.recipes.recipe_file import load_recipe
from plait.recipes.stages import load_stages

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
STAGES: Mapping[str, str] = {"film": "policy"}


@dataclass(frozen=True)
class Setting:
    """recipe: the name of its file; keys: in place of the file's; plan: named"""

    recipe: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    devices: int = 1
    plan: str = "colocated"


SETTINGS: Mapping[str, Setting] = {
    "demo": Setting("demo"),
    "demo, half of the prompts": Setting("demo", {"prompts_per_step": 8}),
    "demo, adapters": Setting("demo", {"lora.rank": 16}),
    "demo, two devices": Setting("demo", devices=2),
    "film": Setting("film"),
    "film, twice the prompts": Setting("film", {"prompts_per_step": 32}),
    "film, half as long": Setting("film", {"sampling.max_response_tokens": 16}),
    "film, two devices, split": Setting("film", devices=2, plan="split"),
}
CORRECTING: Mapping[str, Setting] = {
    "demo": Setting("demo", {"prompts_per_step": 12}),
    "film": Setting("film", {"prompts_per_step": 24}),
}
"""Of each recipe a run whose measurement corrects the profile, and whose samples' lengths are those of predictions."""
UNMEASURED: Mapping[str, Any] = {
    "evaluation.items": 0,
    "evaluation.functions": [],
    "checkpoint.every": 0,
    "doctor.enabled": False,
}
"""Keys of what a run does beside its steps."""


def recipe_of_setting(setting: Setting, folder: Path, *, steps: int, is_tiny: bool) -> dict[str, Any]:
    """The recipe of its file as a mapping, for one thread of each process; the scorer of the film is written to
    `folder`, once: as large as the one that the recipe trains, with a random head."""
    tiny = _tiny(setting.recipe, folder) if is_tiny else {}
    keys = {"steps": steps, "threads": 1, "devices": setting.devices, "plan": setting.plan}
    keys |= {**UNMEASURED, **tiny, **setting.keys}
    if setting.recipe == "film":
        model = str(keys.get("model", load_stages(RECIPES / "film.yaml").foreseen("policy").model))
        keys |= {"reward.model": write_reward_model(str(hub.resolve(model)), folder / "reward")}
    return read_with(setting.recipe, keys)


def read_with(name: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """A shipped recipe with these keys in place of its own, as a mapping; models of other stages are those that these
    begin with."""
    path, stage = RECIPES / f"{name}.yaml", STAGES.get(name)
    if stage is None:
        recipe = load_recipe(path, list(keys.items()))
    else:
        recipe = load_stages(path, [(f"{stage}.{key}", value) for key, value in keys.items()]).foreseen(stage)
    return recipe.model_dump(mode="json")


def _tiny(name: str, folder: Path) -> dict[str, Any]:
    """A random model of two layers, and in place of reviews, which have to be fetched, words."""
    if not (folder / "model").is_dir():
        write_llama(folder / "model", word_tokenizer(512), hidden=64, intermediate=128, positions=256)
        texts = [" ".join(f"w{(7 * row + word) % 500 + 2}" for word in range(6)) for row in range(64)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    raw = {"data.chat_template": False, "data.examples": []}
    keys: dict[str, Any] = {"model": str(folder / "model"), "dtype": "float32", **raw}
    if name == "film":
        keys |= {"data.source": str(folder / "prompts.jsonl"), "data.parameters": {}}
    return keys
