"""Recipes from files and command lines: reading, overriding, and naming what is wrong in them. Torch-free."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from plait.data.files import why_no_file
from plait.errors import ConfigError
from plait.json_text import MAX_DIGITS, Malformed
from plait.recipes.other_names import answer
from plait.recipes.recipe import Recipe
from plait.yaml_text import parse

LIST_HINT = "; `plait train --help-all` lists every key"


def load_recipe(path: Path | None, overrides: Sequence[tuple[str, Any]] = ()) -> Recipe:
    """Read a YAML recipe and apply `(dotted key, value)` overrides; the later wins.

    A single value for a key that takes a list becomes a list of one.

    Raises:
        ConfigError: the file cannot be read or is malformed, a key is unknown (the nearest valid name is offered), or
            a value does not fit.
    """
    tree = {} if path is None else read_tree(path)
    if "stages" in tree:
        raise ConfigError(f"recipe `{path}` has several stages; `plait train` and `plait.train` run these")
    return recipe_of(merged(tree, overrides))


def merged(tree: Mapping[str, Any], overrides: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A copy of the tree with `(dotted key, value)` set; the later wins, and either of `steps` and `epochs` over the
    other."""
    changed = with_sections(without_other_length(copy.deepcopy(dict(tree)), dict(overrides)))
    for key, value in overrides:
        _set(changed, key.split("."), value, key)
    return changed


def with_sections(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree where a list of sources is the section of the first of them, with the others as its `more`."""

    def section(value: Any) -> Any:
        is_list = isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value)
        return {**value[0], "more": value[1:]} if is_list else value

    return {name: section(value) if name in ("data", "pretraining") else value for name, value in tree.items()}


def without_other_length(tree: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The tree without the length of the run (`steps` or `epochs`) that `over`, which is laid over it, takes the place
    of. What says both at once is left for `Recipe` to refuse."""
    said = {name for name in ("steps", "epochs") if over.get(name) is not None}
    return {name: value for name, value in tree.items() if not said or name not in ("steps", "epochs")}


def recipe_of(tree: Mapping[str, Any]) -> Recipe:
    """Raises ConfigError where a key is unknown or missing, or a value does not fit."""
    try:
        return Recipe.model_validate(_checked(tree, Recipe, ""))
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def read_tree(path: Path, what: str = "recipe") -> dict[str, Any]:
    """The mapping of keys that a YAML file holds.

    Args:
        what: the file is, for messages.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    if not path.is_file():
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
        raise ConfigError(f"{what} `{path}` must be a mapping of keys, found {type(loaded).__name__}")
    return loaded


def parse_overrides(
    tokens: Sequence[str], flags: Sequence[str] = (), stages: Sequence[str] = ()
) -> list[tuple[str, Any]]:
    """`--key value` or `--key=value` pairs; dashes in a key read as underscores.

    The value of a key that holds text or a path is taken as it stands (`null` unsets one that may be unset); of a key
    that holds a list, it is a YAML list if it begins with `[`, else its only element; any other is read as YAML.

    Args:
        flags: options without a value that the command has besides, offered where a name is near to theirs.
        stages: names that a key may begin with, `--NAME.key value`.

    Raises:
        ConfigError: a token is no option, a key is unknown, or an option has no value.
    """
    pairs: list[tuple[str, Any]] = []
    queue = list(tokens)
    while queue:
        token = queue.pop(0)
        if not token.startswith("--"):
            raise ConfigError(f"expected `--key value`, found `{token}`; put quotes around a value with spaces")
        name, separator, value = token[2:].partition("=")
        if flag := difflib.get_close_matches(f"--{name}", flags, n=1, cutoff=0.8):
            raise ConfigError(f"unknown option `{token}`; did you mean `{flag[0]}`?")
        key = name.replace("-", "_")
        stage, _, rest = key.partition(".")
        annotation = _annotation(rest if stage in stages and rest else key)
        if not separator:
            if not queue or queue[0].startswith("--"):
                needs = "a value (true or false)" if annotation is bool else "a value"
                hint = f" (one that begins with dashes: `--{name}={queue[0]}`)" if queue and annotation is str else ""
                raise ConfigError(f"`--{name}` needs {needs}{hint}")
            value = queue.pop(0)
        pairs.append((key, _value(name, annotation, value)))
    return pairs


def _annotation(key: str) -> Any:
    """The type of a dotted key; None for a section and for what lies inside `options` or task parameters."""
    model: type[BaseModel] = Recipe
    first, *rest = key.split(".")
    while True:
        info = model.model_fields.get(first)
        if info is None:
            raise _unknown(key)
        section = _section(info.annotation)
        if section is None or not rest:
            return None if section or rest else info.annotation
        model, first, *rest = section, *rest


def _value(name: str, annotation: Any, text: str) -> Any:
    alternatives = _alternatives(annotation)
    text_only = annotation is not None and all(_is_text(member) for member in alternatives if member is not NoneType)
    a_list = any(get_origin(member) is tuple for member in alternatives)
    if text_only and not (a_list and text.startswith("[")):
        if text in _choices(annotation):
            return text
        return None if text == "null" and NoneType in alternatives else [text] if a_list else text
    try:
        return parse(text, texts_only=text_only)
    except Malformed as error:
        raise ConfigError(f"`--{name}`: `{shortened(text)}` is not valid YAML: {error}") from None


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_text(annotation: Any) -> bool:
    """Whether every value of a type is written as text: texts, paths, names of a choice, and tuples of these."""
    match get_origin(annotation):
        case None:
            return isinstance(annotation, type) and issubclass(annotation, str | Path)
        case origin if origin is tuple:
            return all(_is_text(member) for member in get_args(annotation) if member is not Ellipsis)
        case origin if origin is Literal:
            return all(isinstance(choice, str) for choice in get_args(annotation))
    return False


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The single words that a key takes beside its list, such as `all-linear`."""
    return tuple(c for m in _alternatives(annotation) if get_origin(m) is Literal for c in get_args(m))


def _takes_list(annotation: Any) -> bool:
    """Whether it is a list of any number of single values."""
    return any(
        get_origin(member) is tuple
        and get_args(member)[-1] is Ellipsis
        and get_origin(get_args(member)[0]) is not tuple
        for member in _alternatives(annotation)
    )


def describe_keys(model: type[BaseModel] | None = None) -> Iterator[tuple[str, str, str]]:
    """(dotted key, default as text, description) of every key of a settings class, a recipe by default."""
    yield from _walk(model or Recipe, "")


def _walk(model: type[BaseModel], prefix: str, *, optional: bool = False) -> Iterator[tuple[str, str, str]]:
    for name, info in model.model_fields.items():
        section = _section(info.annotation)
        if section is not None:
            yield from _walk(section, f"{prefix}{name}.", optional=NoneType in _alternatives(info.annotation))
        elif info.is_required() and optional:
            yield f"{prefix}{name}", "none", info.description or ""
        else:
            default = "required" if info.is_required() else _plain(info.get_default(call_default_factory=True))
            yield f"{prefix}{name}", default, info.description or ""


def _plain(value: Any) -> str:
    match value:
        case StrEnum():
            return value.value
        case () | {}:
            return "none"
        case _:
            return str(value)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The settings class of a section, one that may be left out included."""
    sections = [a for a in _alternatives(annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
    return sections[0] if sections else None


def _element(annotation: Any) -> type[BaseModel] | None:
    """The settings class of which a key takes a list."""
    return _section(get_args(annotation)[0]) if get_origin(annotation) is tuple and get_args(annotation) else None


def _set(tree: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    for part in path[:-1]:
        child = tree.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"`{key}` cannot be set: `{part}` is not a section but {child!r}")
        tree = child
    tree[path[-1]] = value


def _checked(tree: Mapping[str, Any], model: type[BaseModel], prefix: str) -> dict[str, Any]:
    """The tree with every name found among the keys, and single values made lists where lists are taken.

    Keys inside `options` and task parameters are their owners'.
    """
    checked: dict[str, Any] = {}
    for name, value in tree.items():
        info = model.model_fields.get(name)
        if info is None:
            raise _unknown(f"{prefix}{name}", value)
        section = _section(info.annotation)
        if section is not None and not (value is None and NoneType in _alternatives(info.annotation)):
            if not isinstance(value, Mapping):
                raise ConfigError(f"`{prefix}{name}` is a section of keys, found {value!r}")
            value = _checked(value, section, f"{prefix}{name}.")
        elif (element := _element(info.annotation)) is not None and isinstance(value, list | tuple):
            value = [
                _checked(one, element, f"{prefix}{name}.{place}.") if isinstance(one, Mapping) else one
                for place, one in enumerate(value)
            ]
        elif _takes_list(info.annotation) and not isinstance(value, list | tuple | Mapping | None):
            value = value if value in _choices(info.annotation) else [value]
        checked[name] = value
    return checked


def _unknown(key: str, value: Any = None) -> ConfigError:
    near = answer(key, value) or nearest(key, [name for name, _, _ in describe_keys()]) or LIST_HINT
    return ConfigError(f"unknown key `{key}`{near}")


def nearest(name: str, names: Sequence[str]) -> str:
    """`; did you mean …?`, or nothing when no valid name is near; a bare leaf name finds its section too."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if not close:
        leaves = {full.rsplit(".", 1)[-1]: full for full in names}
        match = difflib.get_close_matches(name.rsplit(".", 1)[-1], list(leaves), n=1, cutoff=0.7)
        close = [leaves[match[0]]] if match else []
    return f"; did you mean `{close[0]}`?" if close else ""


def _explain(error: ValidationError, *section: str) -> str:
    lines = []
    for detail in error.errors():
        key = ".".join((*section, *map(str, detail["loc"])))
        if detail["type"] == "missing":
            lines.append(f"key `{key}` is missing; set it in the recipe or with --{_required_in(key)}")
        elif isinstance(cause := detail.get("ctx", {}).get("error"), ValueError) and isinstance(detail["input"], dict):
            lines.append(f"key `{key}`: {cause}" if key else str(cause))  # of several keys together, which it names
        else:
            lines.append(f"key `{key}`: {detail['msg'][:1].lower()}{detail['msg'][1:]}, found {found(detail['input'])}")
    return "; ".join(lines)


def found(value: Any) -> str:
    """A value as a recipe would have it, in a line of a message."""
    match value:
        case None | bool():
            return str(value).lower().replace("none", "null")
        case int() if abs(value) >= 10**MAX_DIGITS:
            return f"a number of more than {MAX_DIGITS} digits"
    return shortened(repr(value))


def shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


def _required_in(key: str) -> str:
    """The key itself, or of a section the first key in it that has to be given."""
    info = Recipe.model_fields.get(key)
    section = None if info is None else _section(info.annotation)
    names = [] if section is None else [name for name, one in section.model_fields.items() if one.is_required()]
    return f"{key}.{names[0]}" if names else key


def validate_options(cls: type[Any], options: Mapping[str, Any]) -> Any:
    """Build an algorithm's options from the recipe's `options` section, errors named as `options.KEY`.

    Raises:
        ConfigError: a key is unknown, missing or ill-typed.
    """
    from pydantic import TypeAdapter

    names = list(getattr(cls, "model_fields", None) or getattr(cls, "__dataclass_fields__", {}))
    for name in options:
        if names and name not in names:
            near = answer(f"options.{name}") or nearest(name, names)
            raise ConfigError(f"unknown key `options.{name}`{near}")
    try:
        return TypeAdapter(cls).validate_python(dict(options))
    except ValidationError as error:
        raise ConfigError(_explain(error, "options")) from None
