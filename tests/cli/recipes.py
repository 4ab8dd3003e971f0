"""Recipes as files for the command line."""

from __future__ import annotations

import json
from pathlib import Path

from plait.recipes.recipe import Recipe


def write_recipe(recipe: Recipe, path: Path) -> Path:
    path.write_text(json.dumps(recipe.model_dump(mode="json")))  # JSON is YAML
    return path
