"""Recipes from files and command lines: reading, overriding, and naming what is wrong in them. Torch-free."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Final, get_origin

from pydantic import BaseModel, ValidationError

from plait.data.files import why_no_file
from plait.data.settings import SEVERAL
from plait.errors import ConfigError
from plait.json_text import Malformed, kind_of
from plait.output import run_holding
from plait.recipes.keys import (
    alternatives,
    choices,
    element_of,
    nearest,
    no_section,
    section_of,
    shown,
    takes_list,
    unknown_key,
)
from plait.recipes.other_names import answer, answer_value
from plait.recipes.recipe import Recipe, check_read
from plait.recipes.renamed_keys import renamed_value, with_new_names
from plait.recipes.usual_names import usual_value
from plait.settings import Settings, said_of_value
from plait.yaml_text import parse

NOTHING_SAID: Final = object()
"""The value of an override that names a section, and says none of its keys: what is there stays."""


def load_recipe(path: Path | None, overrides: Sequence[tuple[str, Any]] = ()) -> Recipe:
    """Read a YAML recipe and apply `(dotted key, value)` overrides; the later wins.

    A single value for a key that takes a list becomes a list of one.

    Raises:
        ConfigError: the file cannot be read or is malformed, a key is unknown (the nearest valid name is offered), or
            a value does not fit.
    """
    return recipe_of(recipe_tree(path, overrides))


def recipe_tree(path: Path | None, overrides: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The keys of a YAML recipe with overrides over them, which `recipe_of` checks. One in the folder of a run may be
    of an earlier version: its keys have the names of today.

    Raises:
        ConfigError: the file cannot be read, or has several stages; a key leads through a value that is no section.
    """
    tree = {} if path is None else read_tree(path)
    if "stages" in tree:
        raise ConfigError(
            f"recipe `{path}` has several stages, which `plait train` and `plait.train` run; for anything else give "
            "the `recipe.yaml` in the folder of one that has begun"
        )
    is_stored = path is not None and run_holding(path) is not None
    return merged(with_new_names(tree) if is_stored else tree, overrides)


def merged(tree: Mapping[str, Any], overrides: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A copy of the tree with `(dotted key, value)` set; the later wins, and either of `steps` and `epochs` over the
    other.

    Raises:
        ConfigError: a key leads through a value that is no section.
    """
    changed = with_sections(without_other_length(copy.deepcopy(dict(tree)), dict(overrides)))
    for key, value in overrides:
        if value is NOTHING_SAID:
            _section(changed, key.split("."), key)
        else:
            *sections, name = key.split(".")
            _section(changed, sections, key)[name] = with_sections({key: value})[key]
    return changed


def with_sections(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree where a list of sources is the section of the first of them, with the others as its `more`."""

    def section(value: Any) -> Any:
        is_list = isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value)
        return {**value[0], "more": value[1:]} if is_list else value

    return {name: section(value) if name in ("data", "pretraining") else value for name, value in tree.items()}


def without_other_length(tree: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The tree without the length of the run (`steps` or `epochs`) that `over`, which is laid over it, takes the place
    of. What says both at once is left for `Recipe` to refuse."""
    stated = {name for name in ("steps", "epochs") if over.get(name) is not None}
    return {name: value for name, value in tree.items() if not stated or name not in ("steps", "epochs")}


def recipe_of(tree: Mapping[str, Any]) -> Recipe:
    """The recipe that a tree of keys says.

    Raises:
        ConfigError: a key is unknown or missing, or a value does not fit.
    """
    if unknown := unknown_keys(tree):
        raise ConfigError(*unknown)
    wrong: list[str] = []
    checked = _checked(tree, Recipe, wrong)
    if wrong:
        raise ConfigError(*wrong)
    try:
        return Recipe.model_validate(checked)
    except ValidationError as error:
        raise ConfigError(*_explain(error)) from None


def read_tree(path: Path, what: str = "recipe") -> dict[str, Any]:
    """The mapping of keys that a YAML file holds.

    Args:
        what: the file is, for messages.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    if not os.path.isfile(path):
        raise ConfigError(f"{what} `{path}` {why_no_file(path)}; give the path of a YAML file")
    try:
        loaded = parse(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{what} `{path}` is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(f"{what} `{path}` cannot be read: {error.strerror or error}") from None
    except Malformed as error:
        raise ConfigError(f"{what} `{path}` is not valid YAML: {error}") from None
    if not isinstance(loaded, dict):
        found = "nothing in it" if loaded is None else kind_of(loaded)
        raise ConfigError(f"{what} `{path}` must be a mapping of keys, found {found}")
    return loaded


def _section(tree: dict[str, Any], path: Sequence[str], key: str) -> dict[str, Any]:
    """The section at a path, empty where there was none."""
    for section in path:
        child = tree.setdefault(section, {})
        if not isinstance(child, dict):
            raise ConfigError(f"`{key}` cannot be set: `{section}` is not a section but {child!r}")
        tree = child
    return tree


def unknown_keys(tree: Mapping[str, Any]) -> list[str]:
    """What to say of each key of a tree that recipes do not have; those in `options` are the flow's."""
    return list(_unknown(tree, Recipe))


def _unknown(tree: Mapping[str, Any], model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """A message for each unknown key (a recipe of another system has many)."""
    for name, value in tree.items():
        info = model.model_fields.get(name)
        if info is None:
            yield str(unknown_key(f"{prefix}{name}", value))
            continue
        section, element = section_of(info.annotation), element_of(info.annotation)
        if section is not None and isinstance(value, Mapping):
            yield from _unknown(value, section, f"{prefix}{name}.")
        elif element is not None and isinstance(value, list | tuple):
            for place, item in enumerate(value):
                yield from _unknown(item if isinstance(item, Mapping) else {}, element, f"{prefix}{name}.{place}.")


def _checked(tree: Mapping[str, Any], model: type[BaseModel], wrong: list[str], prefix: str = "") -> dict[str, Any]:
    """The tree, whose keys are all known, with single values made lists where lists are taken.

    Keys inside `options` and task parameters are their owners'.

    Args:
        wrong: gets a message for each value that is given where a section of keys belongs, and the other way round.
    """
    checked: dict[str, Any] = {}
    for name, value in tree.items():
        info = model.model_fields[name]
        section = section_of(info.annotation)
        if section is not None and not (value is None and NoneType in alternatives(info.annotation)):
            if not isinstance(value, Mapping):
                key = f"{prefix}{name}.{next(iter(section.model_fields))}"
                several = f"; {SEVERAL}" if name == "data" and isinstance(value, list | tuple) else ""
                wrong.append(f"`{prefix}{name}` is a section of keys, such as `{key}`, found {shown(value)}{several}")
                continue
            value = _checked(value, section, wrong, f"{prefix}{name}.")
        elif (element := element_of(info.annotation)) is not None and isinstance(value, list | tuple):
            value = [
                _checked(item, element, wrong, f"{prefix}{name}.{place}.") if isinstance(item, Mapping) else item
                for place, item in enumerate(value)
            ]
        elif isinstance(value, Mapping) and element is None and get_origin(info.annotation) is not dict:
            wrong.append(str(no_section(f"{prefix}{name}", answer(f"{prefix}{name}", value))))
        elif takes_list(info.annotation) and not isinstance(value, list | tuple | Mapping | None):
            value = value if value in choices(info.annotation) else [value]
        checked[name] = value
    return checked


def _explain(error: ValidationError, *section: str) -> list[str]:
    """What to say of each key that does not fit."""
    lines = []
    for detail in error.errors():
        key = ".".join((*section, *map(str, detail["loc"])))
        found = detail["input"]
        if detail["type"] == "missing" and isinstance(detail["loc"][-1], int):  # the last one is told of last
            around, _, place = key.rpartition(".")
            told = (f"key `{around}`: expected ", f"key `{around}.")  # of the list, or of values that it has
            lines = [line for line in lines if not line.startswith(told)]
            lines.append(_miscounted(around, int(place) + 1, found))
        elif detail["type"] == "too_long" and detail["ctx"]["field_type"] == "Tuple":
            lines.append(_miscounted(key, detail["ctx"]["max_length"], found))
        elif detail["type"] == "missing":
            lines.append(f"key `{key}` is missing; set it in the recipe or with --{_required_in(key)}")
        elif isinstance(cause := detail.get("ctx", {}).get("error"), ValueError):
            lines.append(f"key `{key}`: {cause}" if key else str(cause))  # which says what was found, and where
        else:
            meant = answer_value(key, found) or renamed_value(key, found) or usual_value(key)
            lines.append(f"key `{key}`: {said_of_value(detail)}, found {shown(found)}{meant}")
    return lines


def _miscounted(key: str, number: int, found: Any) -> str:
    """What to say of a key that takes a list of so many values."""
    return f"key `{key}`: expected {number} values, found {shown(found)}"


def _required_in(key: str) -> str:
    """The key itself, or of a section the first key in it that has to be given."""
    info = Recipe.model_fields.get(key)
    section = None if info is None else section_of(info.annotation)
    names = [] if section is None else [name for name, field in section.model_fields.items() if field.is_required()]
    return f"{key}.{names[0]}" if names else key


def option_names(cls: type[Any]) -> tuple[str, ...]:
    """The keys of a class of options, a pydantic model or a dataclass; none where they are not known."""
    return tuple(getattr(cls, "model_fields", None) or getattr(cls, "__dataclass_fields__", {}))


def validate_options(
    cls: type[Any],
    options: Mapping[str, Any],
    elsewhere: Callable[[str], str] = lambda name: "",
    *,
    lets_be: bool = False,
) -> Any:
    """Build an algorithm's options from the recipe's `options` section, errors named as `options.KEY`.

    Args:
        elsewhere: what to say of an unknown option that other algorithms have; empty where none has.
        lets_be: keys may be without effect (`Recipe.lets_be`).

    Raises:
        ConfigError: keys are unknown, or one is missing, ill-typed, or without effect.
    """
    from pydantic import TypeAdapter

    if unknown := unknown_options(cls, options, elsewhere):
        raise ConfigError(*unknown)
    try:
        checked = TypeAdapter(cls).validate_python(dict(options))
    except ValidationError as error:
        raise ConfigError(*_explain(error, "options")) from None
    if isinstance(checked, Settings) and not lets_be:
        check_read("options", checked)
    return checked


def unknown_options(cls: type[Any], options: Mapping[str, Any], elsewhere: Callable[[str], str]) -> list[str]:
    """What to say of each option that a class of options does not have; arguments as of `validate_options`."""
    names = option_names(cls)
    said_of = lambda key, name: answer(key) or elsewhere(name) or _said_of_own(name) or nearest(name, names, "options.")
    unknown = [(f"options.{name}", name) for name in options if names and name not in names]
    return [f"unknown key `{key}`{said_of(key, name)}" for key, name in unknown]


def _said_of_own(name: str) -> str:
    """What to say of an unknown option that is a key of the recipe itself."""
    return f"; `{name}` stands beside `options`, not in it" if name in Recipe.model_fields else ""
