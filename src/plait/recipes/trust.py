"""Whose word it is that code may run: a recipe that a user gives is a program, what lies in a run's folder is data.

Flows and reward functions are files that a recipe names, and naming them runs them. A recipe that a run has stored (or
that lies anywhere in a run's folder) may come from somebody else together with the run; what it names is run only if
the user names it too, on the command line, or says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plait.data.settings import DataSettings
from plait.errors import ConfigError
from plait.output import run_holding
from plait.recipes.algorithm import BUILT_IN, checked_recipe
from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import recipe_tree


def user_recipe(
    path: Path | None, overrides: Sequence[tuple[str, Any]], *, trust_run_code: bool = False, trains: bool = False
) -> Recipe:
    """`load_recipe`, of a recipe whose code is about to run; unknown options of a built-in algorithm are told with
    unknown keys. What a run has begun with may have keys without effect.

    Args:
        trains: its `run_dir` is about to be written.

    Raises:
        ConfigError: as there; or the file lies in the folder of a run, and names code that `overrides` do not name, or
            is to train in another folder, which they do not name: it is a copy, or has been moved.
    """
    recipe = checked_recipe(recipe_tree(path, overrides))
    if path is not None and not trust_run_code:
        check_origin(path, recipe, overrides)
    if path is None or (run := run_holding(path)) is None:
        return recipe
    if trains and "run_dir" not in dict(overrides) and run_holding(recipe.run_dir) != run:
        raise ConfigError(
            f"recipe `{path}` lies in the folder of a run, `{run}`, but its `run_dir` is `{recipe.run_dir}`: give "
            f"--run_dir {run} to go on with that run, or the folder that you mean"
        )
    return recipe.letting_be()


def check_origin(path: Path, recipe: Recipe, overrides: Sequence[tuple[str, Any]]) -> None:
    """Raises ConfigError where a recipe file in a run's folder is all that says which code to run."""
    run = run_holding(path)
    if run is None:
        return
    overridden = {key for key, _ in overrides}
    overridden |= {f"{key}.rows" for key in overridden if key.endswith((".more", ".sets"))}
    named = {key: names for key, names in code_of(recipe).items() if key not in overridden}
    if named:
        listed = "; ".join(f"`{key}`: {', '.join(names)}" for key, names in named.items())
        raise ConfigError(
            f"recipe `{path}` lies in the folder of a run, `{run}`, which is data, but names code to run ({listed}); "
            "give a recipe of your own or these keys yourself, or read that code and add --trust-run-code (from "
            "Python: trust_run_code=True)"
        )


def code_of(recipe: Recipe) -> dict[str, tuple[str, ...]]:
    """Key of the recipe → the functions of the user's that it names; those of plait are left out."""
    named = {
        **_makers_of_rows("data", recipe.data),
        **({} if recipe.pretraining is None else _makers_of_rows("pretraining", recipe.pretraining)),
        "algorithm": () if recipe.algorithm in BUILT_IN else (recipe.algorithm,),
        "reward.functions": recipe.reward.functions,
        "cost.functions": recipe.cost.functions,
        "evaluation.functions": recipe.evaluation.functions,
        "evaluation.sets.rows": tuple(own.rows for own in recipe.evaluation.sets if own.rows is not None),
        "turns.reply": () if recipe.turns.reply is None else (recipe.turns.reply,),
        "turns.tools": recipe.turns.tools,
    }
    own = {key: tuple(name for name in names if _is_of_the_user(name)) for key, names in named.items()}
    return {key: names for key, names in own.items() if names}


def _makers_of_rows(section: str, settings: DataSettings) -> dict[str, tuple[str, ...]]:
    """What makes rows of the first source of a section, and of further ones, for which other keys speak."""
    return {
        f"{section}.rows": () if settings.rows is None else (settings.rows,),
        f"{section}.more.rows": tuple(source.rows for source in settings.more if source.rows is not None),
    }


def _is_of_the_user(name: str) -> bool:
    """`task` and `well_formed` are words for plait's own functions."""
    return (":" in name or "." in name) and not name.startswith("plait.")
