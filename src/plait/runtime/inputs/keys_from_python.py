"""Keys of a recipe that are given as Python values: sections as dicts or objects, functions, arrays, paths."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from torch.nn import Module

from plait.errors import ConfigError
from plait.recipes.recipe_file import NOTHING_SAID


def overrides_of(keys: Mapping[str, Any], algorithm: Any, reward: Any) -> list[tuple[str, Any]]:
    """(dotted key, value) of all that `plait.train` is given beside a recipe; arguments: see there.

    Raises:
        ConfigError: a key holds rows, a model, or a function that has no name in a file.
    """
    for name in ("data", "pretraining"):
        _refuse_rows(name, keys.get(name))
    evaluation = keys.get("evaluation")
    sets = evaluation.get("sets") if isinstance(evaluation, Mapping) else None
    if isinstance(sets, Mapping) and "source" not in sets:  # as `eval_dataset` of TRL names them
        sets = list(sets.values())
    for each in sets if isinstance(sets, list | tuple) else [sets]:
        _refuse_rows("evaluation.sets", each)
    said = [pair for name, value in keys.items() for pair in flattened(name, value, replaces=algorithm is not None)]
    if algorithm is not None:
        said.append(("algorithm", _path(algorithm)))
    if reward is not None:
        section = dict(reward) if isinstance(reward, Mapping) else {"functions": reward}
        if "functions" in section:
            section["functions"] = _paths(section["functions"])
        said += flattened("reward", section)
    return said


def _path(function: str | Callable[..., Any]) -> str:
    return function if isinstance(function, str) else path_of(function)


def _paths(functions: Any) -> list[str]:
    """What names one function, or several."""
    is_one = isinstance(functions, str) or not isinstance(functions, Sequence)
    named: Sequence[Any] = [functions] if is_one else functions
    return [_path(function) for function in named]


def path_of(function: Callable[..., Any]) -> str:
    """`FILE.py:FUNCTION`, under which a run's recipe names a function given from Python, and finds it again.

    Raises:
        ConfigError: the function is not defined at the top level of a file.
    """
    file = inspect.getsourcefile(inspect.unwrap(function)) if inspect.isfunction(function) else None
    if file is None or not _is_found_by_name(function) or not Path(file).is_file():
        raise ConfigError(
            f"`{getattr(function, '__qualname__', function)}` cannot be named in a recipe: give a function that is "
            "defined at the top level of a file under that name, or its path FILE.py:FUNCTION"
        )
    return f"{file}:{function.__name__}"


def _is_found_by_name(function: Callable[..., Any]) -> bool:
    """Whether the top level of its module has it under its name: what wraps a function has that one's name."""
    named = getattr(sys.modules.get(function.__module__), function.__name__, function)
    return function.__qualname__.isidentifier() and (named is function or not hasattr(function, "__wrapped__"))


def flattened(name: str, value: Any, *, replaces: bool = False) -> list[tuple[str, Any]]:
    """(dotted key, value) of a key: of a section those of its keys, of options too; what these hold is one value.

    Args:
        replaces: an algorithm is given beside it: options are one value.

    Raises:
        ConfigError: the value is a model or a tokenizer, and not where one is.
    """
    if isinstance(value, Module) or hasattr(value, "save_pretrained"):
        key = name if name.rpartition(".")[2] == "model" else "model"
        raise ConfigError(
            f"`{name}`: a model is given by its name, a local folder or a hub id, found a {type(value).__name__}; "
            "write it first, with its tokenizer (both have `save_pretrained(FOLDER)`), "
            f"and give the folder as `{key}`"
        )
    value, key = _as_said(value), name.rpartition(".")[2]
    is_options = key == "options"
    if not isinstance(value, dict) or key in ("parameters", "chat_template_kwargs") or (is_options and replaces):
        return [(name, value)]
    if is_options:
        return [(f"{name}.{key}", child) for key, child in value.items()]
    if not value:
        return [(name, NOTHING_SAID)]
    replaces |= "algorithm" in value
    return [pair for key, child in value.items() for pair in flattened(f"{name}.{key}", child, replaces=replaces)]


def _as_said(value: Any) -> Any:
    """The same in the words of a recipe: of a path, of what names a function, of an array, of options and settings as
    an object, of which the values count that were set. A tuple becomes a list."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_unset=True)
    elif is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    elif (as_list := getattr(value, "tolist", None)) is not None:  # of NumPy or torch
        value = as_list()
    if isinstance(value, list | tuple):
        return [_as_said(item) for item in value]
    if isinstance(value, dict):
        return {key: _as_said(item) for key, item in value.items()}
    if inspect.isroutine(value):
        return path_of(value)
    return fspath(value) if isinstance(value, PathLike) else value


def _refuse_rows(name: str, value: Any) -> None:
    """See that a key says where rows are; one that holds them, or an object that does, is a ConfigError."""
    columns = {"prompt", "messages", "text", "chosen"}
    several = isinstance(value, list | tuple) and any(isinstance(item, Mapping) and "source" in item for item in value)
    for section in value if several else [value]:
        found = section.get("source") if isinstance(section, Mapping) else section
        rows = isinstance(found, list | tuple) and any(isinstance(item, Mapping) for item in found)
        held = isinstance(section, Mapping) and any(isinstance(section.get(key), list | tuple) for key in columns)
        if rows or held or not isinstance(found, list | tuple | str | int | float | PathLike | Mapping | None):
            kind = "dict of columns" if held else type(found).__name__
            raise ConfigError(
                f"`{name}` says where rows are, and does not hold them: found a {kind}; write what a program has "
                "made first, by `save_to_disk(FOLDER)` of `datasets` or as JSONL, and give "
                f"`{name}={{'source': FOLDER}}` (docs/data.md)"
            )
