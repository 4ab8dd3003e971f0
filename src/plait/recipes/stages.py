"""A recipe of several stages: each a run of its own in a folder of the recipe's `run_dir`, one after the other.

Keys beside `stages` hold for every stage; a stage's own keys win. `@NAME` in place of a model is what stage NAME ends
with. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.dataflow.unfit import nearest
from plait.errors import ConfigError, UserError
from plait.recipes.algorithm import checked_recipe, traced_flow, unknown_with_options
from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import merged, read_tree, recipe_tree, without_other_length
from plait.recipes.role_models import ToCome, main_role, role_models
from plait.recipes.trust import check_origin

FINAL, MERGED = "final", "merged"
"""Folders of a run with the weights that it ended with: an adapter alone is in the first, whole weights then in the
second."""


@dataclass(frozen=True)
class Stages:
    """The stages of a recipe in order; models of other stages still stand as `@NAME`."""

    recipes: Mapping[str, Recipe]
    file: Path | None
    """That they were read from."""

    @property
    def folder(self) -> Path:
        """That of all stages' folders."""
        return next(iter(self.recipes.values())).run_dir.parent

    def resolved(self, name: str) -> Recipe:
        """The recipe of a stage as it runs, after those before it: `@NAME` is the folder of NAME's final weights."""
        return _replaced(
            self.recipes[name], {stage: str(final_folder(recipe)) for stage, recipe in self.recipes.items()}
        )

    def foreseen(self, name: str) -> Recipe:
        """The recipe of a stage before any has run: `@NAME` is the model that NAME begins with, which has its shape."""
        begins: dict[str, str] = {}
        for stage, recipe in self.recipes.items():
            begins[stage] = _replaced(recipe, begins).model
        return _replaced(self.recipes[name], begins)

    def to_come(self, name: str) -> dict[str, ToCome]:
        """Key of a stage's recipe → the model that will stand there, for keys that hold `@NAME`."""
        return {key: self._ends_with(value) for key, value in self._references(name).items()}

    def sources(self, name: str) -> tuple[str, ...]:
        """The stages whose final weights this one begins with, in their order."""
        used = {value[1:] for value in self._references(name).values()}
        return tuple(stage for stage in self.recipes if stage in used)

    def _references(self, name: str) -> dict[str, str]:
        return {key: value for key, value in self.recipes[name].models_named().items() if value.startswith("@")}

    def _ends_with(self, reference: str) -> ToCome:
        recipe = self.recipes[reference[1:]]
        models = role_models(traced_flow(recipe.letting_be(("options",))), recipe)
        return ToCome(reference, scalar=any(model.trained for model in models) and main_role(models).scalar)


def final_folder(recipe: Recipe) -> Path:
    """Where the whole final weights of a stage are: `final`, or `merged` where `final` holds an adapter alone."""
    return recipe.run_dir / (MERGED if recipe.lora.rank > 0 else FINAL)


def stage_names(path: Path | None) -> tuple[str, ...]:
    """Names of the stages of a recipe file; empty if the recipe has no stages, or the file does not exist.

    Raises:
        ConfigError: the file or its `stages` are malformed.
    """
    if path is None or not os.path.isfile(path):
        return ()
    tree = read_tree(path)
    return tuple(map(str, _stages_of(tree, path))) if "stages" in tree else ()


def _stages_of(tree: Mapping[str, Any], path: Path) -> dict[Any, Any]:
    stages = tree.get("stages")
    if not isinstance(stages, dict) or not stages:
        raise ConfigError(f"recipe `{path}`: `stages` is a mapping of names to recipes, found {stages!r:.80}")
    return stages


def load_stages(path: Path, overrides: Sequence[tuple[str, Any]] = (), *, trust_run_code: bool = False) -> Stages:
    """Read a recipe of several stages. An override `NAME.key` is for one stage, any other for all, also for those that
    have the key themselves; but `model` is that of stages which do not begin with what another ends with.

    Raises:
        ConfigError: a stage is malformed (its name is given), refers to none before it, or names a folder of its own;
            or the file lies in a run's folder and names code (`trust.check_origin`).
    """
    common, trees = _stage_trees(path, overrides)
    recipes: dict[str, Recipe] = {}
    wrong: dict[str, list[str]] = {}
    for name, tree in trees.items():
        try:
            recipes[name] = checked_recipe(tree)
        except ConfigError as error:
            for line in error.args:
                wrong.setdefault(line, []).append(name)
    if wrong:
        raise ConfigError(*_with_stages(wrong))
    for number, (name, recipe) in enumerate(recipes.items()):
        if not trust_run_code:
            check_origin(path, recipe, [*overrides, *_of_stage(name, overrides)])
        _check_references(name, recipe, [*recipes][:number])
    # A common key may be for another stage.
    return Stages({name: recipe.letting_be(common) for name, recipe in recipes.items()}, path)


@contextmanager
def in_stage(name: str) -> Iterator[None]:
    """What a user can mend in a stage is said with its name.

    Raises:
        UserError: the one that came, named by its stage.
    """
    try:
        yield
    except UserError as error:
        raise error.worded(*(f"stage `{name}`: {said}" for said in error.args)) from error


def unknown_in(path: Path | None, overrides: Sequence[tuple[str, Any]]) -> list[str]:
    """What to say of each key of a recipe file, of one run or of several stages, with overrides over it, that there is
    not; nothing of a file that cannot be read."""
    try:
        if path is None or not stage_names(path):
            return unknown_with_options(recipe_tree(path, overrides))
        wrong: dict[str, list[str]] = {}
        for name, tree in _stage_trees(path, overrides)[1].items():
            for line in unknown_with_options(tree):
                wrong.setdefault(line, []).append(name)
    except ConfigError:
        return []
    return _with_stages(wrong)


def _with_stages(wrong: Mapping[str, Sequence[str]]) -> list[str]:
    """The messages, each with the names of the stages that it is about."""
    named = {line: ", ".join(f"`{name}`" for name in names) for line, names in wrong.items()}
    return [f"stage{'s' * (len(wrong[line]) > 1)} {names}: {line}" for line, names in named.items()]


def _of_stage(name: str, overrides: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Those of the overrides `NAME.key` that are for a stage, by its own keys."""
    split = [(key.partition("."), value) for key, value in overrides]
    return [(key, value) for (stage, _, key), value in split if stage == name and key]


def _stage_trees(path: Path, overrides: Sequence[tuple[str, Any]]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The keys beside `stages`, with those overrides that are for all; and by name all keys of each stage.

    Raises:
        ConfigError: the file cannot be read, a stage has a name or a value that no stage may have, or a key leads
            through a value that is no section.
    """
    tree = read_tree(path)
    stages = _stages_of(tree, path)
    del tree["stages"]
    of_all = [(key, value) for key, value in overrides if key.split(".")[0] not in stages]
    common = merged(tree, of_all)
    run_dir = common.pop("run_dir", Recipe.model_fields["run_dir"].default)
    trees: dict[str, dict[str, Any]] = {}
    for name, own in ((str(name), own) for name, own in stages.items()):
        if not name.isidentifier():
            raise ConfigError(f"stage `{name}` needs the name of a folder, of letters, digits and `_`")
        if name in Recipe.model_fields:
            raise ConfigError(
                f"stage `{name}` has the name of a key of recipes, so that `--{name}` would be of the stage and of the "
                f"key; give it another, such as `{name}_stage`"
            )
        if not isinstance(own, dict) or "run_dir" in own:
            raise ConfigError(f"stage `{name}` is a mapping of keys without `run_dir` (that of the recipe holds all)")
        try:
            theirs = [pair for pair in of_all if pair[0] != "model" or not str(own.get("model")).startswith("@")]
            stage = merged(merged(_over(common, own), theirs), _of_stage(name, overrides))
            trees[name] = merged(stage, [("run_dir", run_dir and f"{run_dir}/{name}")])
        except ConfigError as error:
            raise ConfigError(f"stage `{name}`: {error}") from None
    return common, trees


def _over(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Sections are laid over each other; any other value of a stage takes the place of the common one."""
    laid = without_other_length(dict(common), own)
    for name, value in own.items():
        are_sections = isinstance(value, dict) and isinstance(laid.get(name), dict)
        laid[name] = _over(laid[name], value) if are_sections else value
    return laid


def _check_references(name: str, recipe: Recipe, before: list[str]) -> None:
    for key, value in recipe.models_named().items():
        if value.startswith("@") and value[1:] not in before:
            raise ConfigError(
                f"stage `{name}`: key `{key}` is `{value}`, but no stage before it has that name"
                f"{nearest(value[1:], before)}; stages before it: {', '.join(before) or 'none'}"
            )


def _replaced(recipe: Recipe, folders: Mapping[str, str]) -> Recipe:
    for key, value in recipe.models_named().items():
        if value.startswith("@"):
            section, _, leaf = key.partition("[")[0].rpartition(".")
            owner, folder = getattr(recipe, section) if section else recipe, folders[value[1:]]
            stated = getattr(owner, leaf)
            several = isinstance(stated, tuple)
            change = {leaf: tuple(folder if name == value else name for name in stated) if several else folder}
            changed = owner.model_copy(update=change)
            recipe = recipe.model_copy(update={section: changed}) if section else changed
    return recipe
