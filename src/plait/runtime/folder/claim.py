"""Takes the directory of a run, new or resumed, and checks what can be checked before any work."""

from __future__ import annotations

from pathlib import Path

from plait.errors import ConfigError
from plait.models.lora_settings import check_peft
from plait.observe.trackers import check_trackers
from plait.recipes.keys import shown
from plait.recipes.open_keys import MEMORY_KEYS
from plait.recipes.recipe import Recipe
from plait.runtime.folder.directory import RunDirectory
from plait.runtime.folder.stored_recipe import OPTIMIZERS, STEERED_KEYS, changed_keys, gone_keys
from plait.runtime.folder.unsaved import nothing_saved

RESUMABLE_KEYS = frozenset(
    {
        "steps",
        "epochs",
        "evaluation.every",
        "evaluation.best_by",
        "evaluation.patience",
        "evaluation.show",
        "checkpoint.every",
        "checkpoint.keep_last",
        "trackers",
        "overwrite",
        "run_dir",
        "plan",
        "devices",
        *MEMORY_KEYS,
        "sequence_parallel",
        *(f"{section}.{key}" for section in OPTIMIZERS for key in ("shard_gradients", "shard_weights")),
        "fusion",
        "rebalance",
        "launcher",
        "freeze_after_s",
        "stalled_after_s",
        "restarts",
        "reward.timeout_s",
        "cost.timeout_s",
        "reward.memory_gb",
        "cost.memory_gb",
        "reward.workers",
        "cost.workers",
        "reward.max_concurrency",
        "cost.max_concurrency",
        "turns.timeout_s",
        "turns.workers",
        "turns.max_concurrency",
        "doctor.enabled",
        "doctor.stop_on",
        "doctor.repeat_every",
        *STEERED_KEYS,
    }
)
"""Keys that may differ when a run is resumed; every other one would change what its logs compare."""
BEGINS_ANEW = (
    "no step is saved, and keys have other values: the run begins anew, with the evaluation before its first step"
)
"""What is said of a run that `claim` with `resume` takes for one to be replaced."""


def check_packages(recipe: Recipe) -> None:
    """Check that packages are installed which a recipe needs beside those that plait does; imports none.

    Raises:
        ConfigError: a tracker is not known, or not installed.
        ModelError: it has adapters, and peft is not installed.
    """
    check_trackers(recipe.trackers)
    if recipe.lora.rank > 0:
        check_peft()


def claim(recipe: Recipe, *, resume: bool) -> RunDirectory:
    """Take the run directory, and check what can be checked of the run before any work: nothing in it changes.

    With `resume` a run of which no step is saved may have begun by other keys: then it is to be replaced, as
    `RunDirectory.begun` says, and what it has evaluated with it.

    Raises:
        ConfigError: the folder is taken, or holds a run that `recipe` does not continue.
        UserError: as of `check_packages`.
    """
    check_packages(recipe)
    if not resume:
        return RunDirectory.claim(recipe.run_dir, overwrite=recipe.overwrite)
    directory = RunDirectory.resume(recipe.run_dir)
    try:
        _check_same(directory.files.recipe, recipe)
    except ConfigError:
        if not nothing_saved(*directory.files.saved):
            directory.close()
            raise
        directory.begin_anew()
    except BaseException:
        directory.close()
        raise
    return directory


def _check_same(stored: Path, recipe: Recipe) -> None:
    """Raises ConfigError where a run was begun with other values of keys that may not differ, or its recipe cannot be
    read."""
    if gone := gone_keys(stored):
        named = ", ".join(f"`{key}`" for key in gone)
        raise ConfigError(
            f"key `run_dir`: the run in `{recipe.run_dir}` was begun with {named}, which this version of plait "
            "does not have; go on with that which began it (see its run.json), or begin a new one in another `run_dir`"
        )
    changed = [
        f"`{key}` ({shown(then)} then, {shown(now)} now)"
        for key, (then, now) in changed_keys(stored, recipe).items()
        if key not in RESUMABLE_KEYS
    ]
    if changed:
        raise ConfigError(
            f"key `run_dir`: the run in `{recipe.run_dir}` was begun with other values of {', '.join(changed)}; "
            f"give the recipe as it was (see {stored}), or begin a new run in another `run_dir`"
        )
