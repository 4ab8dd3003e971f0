"""What each command of a run on several nodes was given, by which they see that all were given the same."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from plait.recipes.recipe import Recipe
from plait.runtime.folder.history import Origin, code_files
from plait.runtime.folder.named_inputs import digest_of, named_inputs
from plait.runtime.folder.stored_recipe import keys_of

ALONE = ""
"""The name of a recipe that is no stage of another."""
_LEFT_OUT = ("run_dir", "overwrite")
"""Keys that commands do not compare: of the folder each sees that it is the same, and whether it may be overwritten the
leader alone asks."""


class Given(NamedTuple):
    """What a command was given; see `launch.nodes.messages.Joined`."""

    keys: tuple[tuple[str, str], ...]
    files: tuple[tuple[str, str], ...]


def given(recipes: Mapping[str, Recipe]) -> Given:
    """
    Args:
        recipes: of the stages in their order, by name; `{ALONE: recipe}` where there are none.
    """
    names = [name for name in recipes if name != ALONE]
    keys, files = [("stages", json.dumps(names))], dict[str, str]()
    for name, recipe in recipes.items():
        of_stage = f"{name}." if name != ALONE else ""
        keys += [(of_stage + key, json.dumps(value)) for key, value in keys_of(recipe).items() if key not in _LEFT_OUT]
        files |= _files(recipe)
    return Given(tuple(keys), tuple(files.items()))


def _files(recipe: Recipe) -> dict[str, str]:
    """Key of the recipe and what it names → digest of that, of the user's flow and of local models. Files that cannot
    be read are left out: the ranks say why."""
    named = recipe.models_named()
    files = {f"`{key}` {named[key]}": path for key, path in named_inputs(recipe).items() if key in named}
    if (flow := code_files(recipe, Origin((), "")).get("algorithm")) is not None:
        files[f"`algorithm` {recipe.algorithm}"] = flow
    return {name: digest for name, path in files.items() for digest in _digests(path)}


def _digests(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return [digest_of(path)]
    return []
