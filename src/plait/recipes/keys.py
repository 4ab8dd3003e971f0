"""The keys of a recipe: what they are, their types, and values of the command line read as these types."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from plait.errors import ConfigError
from plait.json_text import MAX_DIGITS, Malformed
from plait.recipes.other_names import answer
from plait.recipes.recipe import Recipe
from plait.recipes.renamed_keys import renamed_answer
from plait.recipes.usual_names import usual_answer
from plait.yaml_text import parse

LIST_HINT = "; `plait train --help-all` lists every key"


def is_setting(token: str) -> bool:
    """Whether a token is a key and no path: `--key`, or `key=value` as others write it."""
    is_file = token.endswith((".yaml", ".yml")) or os.path.lexists(token)
    return token.startswith("--") or (not is_file and re.match(r"[+~]*[\w.@-]+=", token) is not None)


def parse_overrides(
    tokens: Sequence[str],
    flags: Sequence[str] = (),
    stages: Sequence[str] = (),
    unknown_in: Callable[[list[tuple[str, Any]]], Sequence[str]] = lambda pairs: (),
) -> list[tuple[str, Any]]:
    """`--key value` or `--key=value` pairs; dashes in a key read as underscores.

    The value of a key that holds text or a path is taken as it stands (`null` unsets one that may be unset); of a key
    that holds a list, it is a YAML list if it begins with `[`, else its only element; any other is read as YAML.

    Args:
        flags: options that the command has besides, offered where a name is near to theirs.
        stages: names that a key may begin with, `--NAME.key value`.
        unknown_in: what to say of keys of the recipe that there are not, with the pairs that are understood over them.

    Raises:
        ConfigError: tokens are no options, keys are unknown, or options have no value; each is answered.
    """
    pairs: list[tuple[str, Any]] = []
    wrong: list[str] = []
    queue = list(tokens)
    while queue:
        try:
            pairs.append(_override(queue, flags, stages))
        except ConfigError as error:
            wrong += error.args
    if wrong:
        raise ConfigError(*wrong, *unknown_in(pairs))
    return pairs


def _override(queue: list[str], flags: Sequence[str], stages: Sequence[str]) -> tuple[str, Any]:
    """The next pair, taken from the queue; of a key that is not understood its value is taken too."""
    token = queue.pop(0)
    if not token.startswith("--"):
        option = token.lstrip("+-")
        remedy = f"; did you mean `--{option}`?" if "=" in option else "; put quotes around a value with spaces"
        raise ConfigError(f"expected `--key value`, found `{token}`{answer(option.partition('=')[0]) or remedy}")
    name, separator, value = token[2:].partition("=")
    has_value = bool(separator) or bool(queue and not queue[0].startswith("--"))
    value = value if separator or not has_value else queue.pop(0)
    if flag := difflib.get_close_matches(f"--{name}", flags, n=1, cutoff=0.8):
        raise ConfigError(f"unknown option `{token}`; did you mean `{flag[0]}`?")
    key = name.replace("-", "_")
    annotation = annotation_of(key, stages)
    if not has_value:
        needs = "a value (true or false)" if annotation is bool else "a value"
        hint = f" (one that begins with dashes: `--{name}={queue[0]}`)" if queue and annotation is str else ""
        if hint:
            queue.clear()  # which of the others are keys is not known
        raise ConfigError(f"`--{name}` needs {needs}{hint}")
    return key, _value(name, annotation, value)


def annotation_of(key: str, stages: Sequence[str] = ()) -> Any:
    """The type of a dotted key, one of a stage or of all; None for a section and for what lies inside `options` or task
    parameters. Raises ConfigError where there is none."""
    stage, _, of_stage = key.partition(".")
    if stage in stages and of_stage:
        try:
            return annotation_of(of_stage)
        except ConfigError as error:
            raise ConfigError(f"stage `{stage}`: {error}") from None
    model: type[BaseModel] = Recipe
    first, *rest = key.split(".")
    while True:
        info = model.model_fields.get(first)
        if info is None:
            raise unknown_key(key)
        section = section_of(info.annotation)
        if rest and section is None and get_origin(info.annotation) is not dict:
            raise unknown_key(key) if answer(key) else no_section(key.removesuffix(f".{'.'.join(rest)}"))
        if section is None or not rest:
            return None if section or rest else info.annotation
        model, first, *rest = section, *rest


def _value(name: str, annotation: Any, text: str) -> Any:
    members = alternatives(annotation)
    text_only = annotation is not None and all(_is_text(member) for member in members if member is not NoneType)
    a_list = any(get_origin(member) is tuple for member in members)
    if text_only and not (a_list and text.startswith("[")):
        if text in choices(annotation):
            return text
        return None if text == "null" and NoneType in members else [text] if a_list else text
    try:
        return parse(text, texts_only=text_only)
    except Malformed as error:
        raise ConfigError(f"`--{name}`: `{shortened(text)}` is not valid YAML: {error}") from None


def alternatives(annotation: Any) -> tuple[Any, ...]:
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


def choices(annotation: Any) -> tuple[Any, ...]:
    """The single words that a key takes beside its list, such as `all-linear`."""
    return tuple(c for m in alternatives(annotation) if get_origin(m) is Literal for c in get_args(m))


def takes_list(annotation: Any) -> bool:
    """Whether it is a list of any number of single values."""
    return any(
        get_origin(member) is tuple
        and get_args(member)[-1] is Ellipsis
        and get_origin(get_args(member)[0]) is not tuple
        for member in alternatives(annotation)
    )


def describe_keys(model: type[BaseModel] | None = None) -> Iterator[tuple[str, str, str]]:
    """(dotted key, default as text, description) of every key of a settings class, a recipe by default."""
    yield from _walk(model or Recipe, "")


def _walk(model: type[BaseModel], prefix: str, *, optional: bool = False) -> Iterator[tuple[str, str, str]]:
    for name, info in model.model_fields.items():
        section = section_of(info.annotation)
        if section is not None:
            yield from _walk(section, f"{prefix}{name}.", optional=NoneType in alternatives(info.annotation))
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
        case (only,):
            return _plain(only)
        case _:
            return str(value)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The settings class of a section, one that may be left out included."""
    sections = [a for a in alternatives(annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
    return sections[0] if sections else None


def element_of(annotation: Any) -> type[BaseModel] | None:
    """The settings class of which a key takes a list."""
    return section_of(get_args(annotation)[0]) if get_origin(annotation) is tuple and get_args(annotation) else None


def unknown_key(key: str, value: Any = None) -> ConfigError:
    names = [name for name, _, _ in describe_keys()]
    near = (
        _nested(key)
        or renamed_answer(key)
        or answer(key, value)
        or usual_answer(key)
        or _meant(key, value, names)
        or LIST_HINT
    )
    return ConfigError(f"unknown key `{key}`{near}")


def no_section(key: str, said: str = "") -> ConfigError:
    """The error of a key that holds a value, where a map of keys is given; `said`: what other systems mean by it."""
    return ConfigError(f"`{key}` is no section of keys{said}")


def _nested(key: str) -> str:
    """What to say of a key that there is, as it is given on the command line, dotted; empty of others."""
    first, *rest = key.split(".")
    model: type[BaseModel] | None = Recipe
    for name in (first, *rest):
        info = None if model is None else model.model_fields.get(name)
        if info is None:
            return ""
        model = section_of(info.annotation)
        if get_origin(info.annotation) is dict:
            break
    return f"; in a file a section holds its keys: `{first}: {{{': {'.join(rest)}: …{'}' * len(rest)}`"


def _meant(key: str, value: Any, names: Sequence[str]) -> str:
    """What to say of a key whose section is misspelt or whose name is shortened (`optimiser.lr`, `sampling.temp`), or
    that is near a valid one; empty where none is."""
    while isinstance(value, Mapping) and len(value) == 1:
        ((name, value),) = value.items()
        key = f"{key}.{name}"
    section, _, leaf = key.rpartition(".")
    sections = {name.rpartition(".")[0] for name in names}
    plain = [name for name in names if "." not in name]
    is_plain = not section and not difflib.get_close_matches(key, plain, n=1, cutoff=0.75)
    if (isinstance(value, Mapping) or is_plain) and (near := _section_near(key, sections)):
        return f"; did you mean the section `{near}`?"
    if section not in sections:
        section = _section_near(section, sections)
        if section and (said := answer(f"{section}.{leaf}")):
            return said
    around = section and f"{section}."
    inside = [name.removeprefix(around) for name in names if name.startswith(around)]
    by_depth = sorted(inside, key=lambda name: name.count("."))
    same = [name for name in by_depth if name.rpartition(".")[2] == leaf]
    short = [name for name in by_depth if _is_short_for(leaf, name.rpartition(".")[2])]
    if found := difflib.get_close_matches(key.removeprefix(around), same, n=1, cutoff=0) or short:
        return f"; did you mean `{around}{found[0]}`?"
    elsewhere = [name for name in names if name.rpartition(".")[2] == leaf]
    elsewhere = [name for name in elsewhere if not name.startswith("evaluation.")] or elsewhere  # as those of training
    if section and len(elsewhere) == 1:
        return f"; did you mean `{elsewhere[0]}`?"
    return (section and nearest(leaf, inside, around)) or nearest(leaf if section else key, names)


def _section_near(name: str, sections: Collection[str]) -> str:
    """The section that is meant by a misspelt or shortened name; empty where none is."""
    name = name.lower()
    begins = sorted(section for section in sections if len(name) > 2 and section.startswith(name))
    return next(iter(begins or difflib.get_close_matches(name, sections, n=1, cutoff=0.7)), "")


def _is_short_for(short: str, name: str) -> bool:
    """Whether it is the first letters of a name's words; or the first word and some of the others, in their order, each
    whole or its beginning."""
    words, parts = name.split("_"), short.split("_")
    left = iter(words)
    in_order = words[0].startswith(parts[0]) and all(any(word.startswith(part) for word in left) for part in parts)
    return (len(short) > 2 and in_order) or (len(short) > 1 and short == "".join(word[:1] for word in words))


def nearest(name: str, names: Sequence[str], prefix: str = "") -> str:
    """`; did you mean …?`, or nothing when no valid name is near; a bare leaf name finds its section too.

    Args:
        prefix: put before the answer, and not compared.
    """
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if not close:
        leaves = {full.rsplit(".", 1)[-1]: full for full in names}
        match = difflib.get_close_matches(name.rsplit(".", 1)[-1], list(leaves), n=1, cutoff=0.7)
        close = [leaves[match[0]]] if match else []
    return f"; did you mean `{prefix}{close[0]}`?" if close else ""


def shown(value: Any) -> str:
    """A value as a recipe would have it, in a line of a message."""
    match value:
        case None | bool():
            return str(value).lower().replace("none", "null")
        case int() if abs(value) >= 10**MAX_DIGITS:
            return f"a number of more than {MAX_DIGITS} digits"
    return shortened(repr(value))


def shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"
