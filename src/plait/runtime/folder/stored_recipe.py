"""The recipe of a run as its folder has it, and how another differs from that."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from plait.errors import ConfigError
from plait.generation.settings import SamplingSettings
from plait.recipes.keys import section_of, shown
from plait.recipes.open_keys import MEMORY_KEYS
from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import merged, read_tree, recipe_of
from plait.recipes.renamed_keys import with_new_names

OPTIMIZERS = ("optimizer", "critic.optimizer", "cost_critic.optimizer")
"""The sections of optimizers."""
_UPDATE_KEYS = tuple(
    f"{section}.{key}" for section in OPTIMIZERS for key in ("learning_rate", "weight_decay", "max_grad_norm")
)
"""How optimizers go on."""
STEERED_KEYS = (*_UPDATE_KEYS, *(f"{section}.on_error" for section in ("reward", "cost", "turns")))
"""By which a user may steer a run on the way: optimizers, and whether it outlives an error of a function. Each stay at
the run says its values."""


def recipe_text(recipe: Recipe) -> str:
    """The resolved recipe as YAML, as the run directory keeps it."""
    import yaml

    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def stored_keys(path: Path) -> dict[str, Any]:
    """The keys of the recipe in a run's folder; those that an earlier version wrote by other names have today's.

    Raises:
        ConfigError: it cannot be read.
    """
    return with_new_names(read_tree(path))


def read_stored(path: Path) -> Recipe:
    """The recipe in a run's folder, that of an earlier version as well.

    Raises:
        ConfigError: it cannot be read, has keys that there are no more, or a value does not fit.
    """
    return recipe_of(merged(stored_keys(path), ()))


def as_begun(old: Path, recipe: Recipe) -> Recipe:
    """The recipe of a run that is resumed: where it leaves open how many samples run at a time, the size of the KV
    pool, how many groups of samples are in flight, what is drafted, or what memory is spent on in training, what the
    stored one says. Keys without effect are let be."""
    stored_tree = stored_keys(old)
    recipe = _with_stored(recipe.letting_be(), stored_tree)
    sampling = stored_tree.get("sampling")
    update: dict[str, Any] = {}
    if not isinstance(sampling, dict):
        return recipe
    if not recipe.sampling.states_running and (stored := sampling.get("max_running")) is not None:
        update |= {"max_running": stored}
    if recipe.sampling.kv_tokens is None and (stored := sampling.get("kv_tokens")) is not None:
        update |= {"kv_tokens": stored, "kv_memory": None}
    if recipe.sampling.decode_groups == "auto":
        update |= {"decode_groups": sampling.get("decode_groups", "auto")}
    if recipe.sampling.speculation == "auto":
        update |= {"speculation": sampling.get("speculation", "auto")}
    return with_sampling(recipe, recipe.sampling.model_copy(update=update))


def _with_stored(recipe: Recipe, stored: Mapping[str, Any]) -> Recipe:
    """With the keys that were found when the run began, on the same GPUs by the same plan."""
    given = recipe.model_dump(mode="json", include={"device", "devices", "plan"})
    if recipe.device != "cuda" or any(stored.get(key) != value for key, value in given.items()):
        return recipe
    return recipe.with_found(**{key: stored[key] for key in MEMORY_KEYS if key in stored})


def had_doctor(old: Path) -> bool:
    """Whether the doctor of a run was on: it is, where its stored recipe does not say otherwise or cannot be read."""
    with suppress(ConfigError):
        section = stored_keys(old).get("doctor")
        return not isinstance(section, Mapping) or section.get("enabled") is not False
    return True


def gone_keys(old: Path) -> list[str]:
    """Dotted keys of a stored recipe that there are no more, as that of another version of plait may have."""
    tree = stored_keys(old)
    return sorted(_flat(tree).keys() - _flat(_known(tree, Recipe)).keys())


def _known(tree: Mapping[str, Any], keys: type[BaseModel]) -> dict[str, Any]:
    """The tree without keys that there are not."""
    known: dict[str, Any] = {}
    for name, value in tree.items():
        if (info := keys.model_fields.get(name)) is not None:
            section = section_of(info.annotation)
            known[name] = _known(value, section) if section is not None and isinstance(value, Mapping) else value
    return known


def _stored(path: Path) -> dict[str, Any]:
    """What a run directory says of its recipe: all keys that there are now, unless it is no recipe any longer."""
    try:
        return read_stored(path).model_dump(mode="json")
    except ConfigError:
        return stored_keys(path)


def changed_keys(old: Path, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Dotted keys in which a stored recipe differs from `new`, each with its value then and now; a KV pool that `new`
    leaves open does not, nor does the default of a key that there was not when it was stored."""
    new = as_begun(old, new)
    before, after = _flat(_stored(old)), keys_of(new)
    both = {key: (before.get(key), after.get(key)) for key in sorted(before.keys() | after.keys())}
    return {key: (then, now) for key, (then, now) in both.items() if then != now}


def keys_of(recipe: Recipe) -> dict[str, Any]:
    """Dotted key → its value, of all keys."""
    return _flat(recipe.model_dump(mode="json"))


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix.rstrip("."): tree}
    return {key: value for name, child in tree.items() for key, value in _flat(child, f"{prefix}{name}.").items()}


def with_sampling(recipe: Recipe, sampling: SamplingSettings) -> Recipe:
    return recipe.model_copy(update={"sampling": sampling})


def steering(recipe: Recipe) -> dict[str, Any]:
    """The values of `STEERED_KEYS`, as JSON has them: an infinite one is a text."""
    values = {key: value for key, value in keys_of(recipe).items() if key in STEERED_KEYS}
    return {key: str(value) if value == math.inf else value for key, value in values.items()}


def said_of_steering(then: Mapping[str, Any], now: Mapping[str, Any], step: int) -> list[str]:
    """What of two stays' `steering` is said from a step on, where it differs."""
    return [
        f"from step {step} on, `{key}` is {shown(value)}; it was {shown(then[key])}"
        for key, value in now.items()
        if then.get(key, value) != value
    ]


def check_left(old: Path, recipe: Recipe, is_done: Callable[[], bool]) -> None:
    """Raises ConfigError where optimizers are to go on otherwise than a stored recipe says, and its run has no step
    left to do. What an error means may still count, in the evaluation behind the last step."""
    steered = [f"`{key}`" for key in changed_keys(old, recipe) if key in _UPDATE_KEYS]
    if steered and is_done():
        raise ConfigError(
            f"key `run_dir`: the run in `{recipe.run_dir}` has done all of its steps, and would do none with other "
            f"values of {', '.join(steered)}; give the recipe as it was (see {old}), or more `steps` (where it has "
            "ended early, more `evaluation.patience`)"
        )
