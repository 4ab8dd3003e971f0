"""What each command of a run on several nodes reads for itself, by which they see that all read the same."""

from __future__ import annotations

import contextlib
from pathlib import Path

from plait.recipes.recipe import Recipe
from plait.runtime.folder.history import Origin, code_files
from plait.runtime.folder.named_inputs import digest_of, named_inputs


def said_files(recipe: Recipe) -> tuple[tuple[str, str], ...]:
    """(key of the recipe and what it names, digest of that) of the user's flow and of local models. Files that cannot
    be read are left out: the ranks say why."""
    named = recipe.models_named()
    files = {f"`{key}` {named[key]}": path for key, path in named_inputs(recipe).items() if key in named}
    if (flow := code_files(recipe, Origin((), "")).get("algorithm")) is not None:
        files[f"`algorithm` {recipe.algorithm}"] = flow
    return tuple(digest for name, path in files.items() for digest in _digests(name, path))


def _digests(name: str, path: Path) -> list[tuple[str, str]]:
    with contextlib.suppress(OSError):
        return [(name, digest_of(path))]
    return []
