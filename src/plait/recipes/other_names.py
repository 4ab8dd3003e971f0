"""The names that other systems have for what a recipe says: an unknown key that is one of theirs is answered with ours.

The names are data, in `other_names.yaml` beside this file; `docs/coming-from-*.md` are made of the same. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("other_names.yaml")
_ANYWHERE = frozenset(
    "path name enable type mode n dtype strategy len device logger steps estimator rollout".split()  # noqa: SIM905
)
"""Last parts of dotted names that alone say too little."""


@dataclass(frozen=True)
class OtherName:
    """Names of one meaning in another system."""

    names: tuple[str, ...]
    keys: tuple[str, ...]
    """Ours; none where there is no equivalent."""
    say: str
    """The conversion, or why there is none and what to do instead; empty where the name alone differs."""
    values: Mapping[str, str]
    """Value there → what it is here, as Markdown, where values have other names too."""

    @property
    def note(self) -> str:
        """Values and what is to be said, for the docs and for messages."""
        values = ", ".join(f"`{theirs}` is {ours}" for theirs, ours in self.values.items())
        return "; ".join(filter(None, (values, self.say)))


@dataclass(frozen=True)
class System:
    """Another system, and what it calls things."""

    id: str
    title: str
    names_of: str
    """Which names they are, for the docs."""
    begin: str
    """What one who comes from it reads first, as Markdown, for the docs; empty where there is nothing."""
    groups: Mapping[str, tuple[OtherName, ...]]

    def entries(self) -> Iterator[OtherName]:
        for group in self.groups.values():
            yield from group


@cache
def systems() -> tuple[System, ...]:
    """All that the file holds, in its order."""
    tree: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return tuple(
        System(
            name,
            section["title"],
            section["names_of"],
            section.get("begin", ""),
            {title: _entries(group) for title, group in section["groups"].items()},
        )
        for name, section in tree.items()
    )


def _entries(group: list[dict[str, Any]]) -> tuple[OtherName, ...]:
    return tuple(
        OtherName(tuple(e["names"]), tuple(e.get("keys", ())), e.get("say", ""), e.get("values", {})) for e in group
    )


def answer(key: str, value: Any = None) -> str:
    """The end of the message `unknown key …` if the key is one of another system; empty if it is not, or if it is one
    of ours under the same name.

    Args:
        key: dotted; of a recipe's `options` with that before it.
        value: what stands there; of a section of keys the first that is known is answered.
    """
    key_of_theirs = key.removeprefix("options.")
    found = next(filter(None, map(_find, _leaves(key_of_theirs, value))), None)
    if found is None:
        return ""
    system, name, entry = found
    if entry.keys == (key,) and not isinstance(value, Mapping):
        return ""  # ours of the same name, which is not known in this place
    place = "" if name == key else f" `{name}`"
    page = f" (docs/coming-from-{system.id}.md)"
    if not entry.keys:
        return f", {system.title}'s{place}, has no equivalent here: {entry.note}{page}"
    ours = " and ".join(f"`{own_key}`" for own_key in _meant(name, entry))
    return f": {system.title}'s{place} is {ours} here{f' ({entry.note})' if entry.note else ''}{page}"


def _meant(name: str, entry: OtherName) -> tuple[str, ...]:
    """Our keys that one of the entry's names means: a single one if the entry has a name for each of its keys, else all
    of them."""
    of_leaf = {key.rpartition(".")[2]: key for key in entry.keys}
    own = of_leaf.get(name.rpartition(".")[2])
    has_each = {named.rpartition(".")[2] for named in entry.names} == of_leaf.keys()
    return (own,) if own is not None and has_each else entry.keys


def answer_value(key: str, value: Any) -> str:
    """What to say of a value that a key of ours does not take, or of the first such in a list, where another system
    calls something so; else empty."""
    asked = [name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str)]
    for system in systems():
        for entry in (entry for entry in system.entries() if key in entry.keys):
            for name in (name for name in asked if name in entry.values):
                return f"; {system.title}'s `{name}` is {entry.values[name]} here (docs/coming-from-{system.id}.md)"
    return ""


def _leaves(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key


def _find(key: str) -> tuple[System, str, OtherName] | None:
    """The entry of the name itself, else of a dotted one that ends with it, else of the section that it is in; else, of
    a key in a section of ours, of a name that ends as it does and whose key is in that section (`optimizer.lr`,
    `sampling.max_completion_length`), or of one that has none and stands alone (`lora.use_dora`) or beside such names
    (`lora.bias`)."""
    every = [(system, name, entry) for system in systems() for entry in system.entries() for name in entry.names]
    exact = next((named for named in every if named[1] == key), None)
    if exact is not None or key in _ANYWHERE:
        return exact
    if (whole := next((named for named in every if named[1].endswith(f".{key}")), None)) is not None:
        return whole
    sections = [key[: place.start()] for place in reversed([*re.finditer(r"\.", key)])]
    theirs = (
        named for around in sections for named in every if named[1] == around and not _is_within(around, named[2])
    )
    inside = next(theirs, None)
    if inside is not None:
        return inside
    section, _, leaf = key.rpartition(".")
    ends = [named for named in every if section and named[1].rpartition(".")[2] == leaf]
    of_section = [named for named in every if any(ours.rpartition(".")[0] == section for ours in named[2].keys)]
    near = {"", *(name.rpartition(".")[0] for _, name, _ in of_section)}
    without = (named for named in ends if not named[2].keys and named[1].rpartition(".")[0] in near)
    return next((named for named in ends if named in of_section), None) or next(without, None)


def _is_within(section: str, entry: OtherName) -> bool:
    """Whether a section of the other system is also one of ours, with the same meaning: an unknown key in it is then
    misspelt, and not a name of theirs."""
    return bool(entry.keys) and all(f"{key}.".startswith(f"{section}.") for key in entry.keys)
