"""Recipes as files for the command line."""

from __future__ import annotations

import json
from pathlib import Path

from plait.recipes.recipe import Recipe


def write_recipe(recipe: Recipe, path: Path) -> Path:
    path.write_text(json.dumps(recipe.model_dump(mode="json")))  # JSON is YAML
    return path


def write_with_reward(text: str, path: Path) -> str:
    """A recipe that names `rewards.py:brief`, which then stands beside it; returns the file's name."""
    path.with_name("rewards.py").write_text("def brief(completions, **columns):\n    return [0.0] * len(completions)\n")
    path.write_text(text)
    return path.name
