"""YAML as plait reads it: what the core of YAML 1.2 says, so that a value means what it looks like.

`yes` and `on` are texts, `1:30` and `2026-01-02` too, and `1e-5` is a number. `010`, which is 8 to some readers and 10
to others, is refused, as are: a key that stands twice, keys that are no texts, tags of Python, what is nested deeper
than anything of ours, and aliases that make of a short text a value without end. Digits may be grouped: `1_000`.
"""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar

import yaml
from yaml.error import MarkedYAMLError

from plait.json_text import MAX_DEPTH, Malformed, check_texts, whole_number

MAX_BYTES = 1 << 20
"""The most bytes of a text: a recipe has some thousands."""
MAX_VALUES = 20_000
"""In a text, those behind aliases counted as often as they are named."""


def parse(text: str, *, texts_only: bool = False) -> Any:
    """The value of a YAML text: dicts with keys that are texts, lists, texts, numbers, booleans and None.

    Args:
        texts_only: every value that is no list and no map is a text, as it stands.

    Raises:
        Malformed: see above.
    """
    if len(text) > MAX_BYTES:
        raise Malformed(f"it has {len(text):,} characters, more than {MAX_BYTES:,}")
    try:
        return yaml.load(text, _Texts if texts_only else _Loader)
    except yaml.YAMLError as error:
        raise Malformed(_one_line(error)) from None
    except Malformed:
        raise
    except ValueError as error:  # an escape beyond Unicode
        raise Malformed(str(error)) from None


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    said: str = error.problem  # type: ignore[attr-defined]
    if said.startswith("but "):
        said = f"{error.context}, {said}"  # type: ignore[attr-defined]
    elif repr("\t") in said:
        said = "found a tab, where spaces are expected"
    return f"{said} (line {mark.line + 1}, column {mark.column + 1})"


class _Bounded(yaml.SafeLoader):
    """Composes nodes no deeper than MAX_DEPTH, and no more than MAX_VALUES of them."""

    # Those of YAML 1.1 are not inherited.
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]
    yaml_constructors: ClassVar[dict[str | None, Any]] = {}  # type: ignore[misc]

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._num_values = 0
        self._size_of: dict[int, int] = {}
        """Node → values in it, aliases followed."""
        self.keys: list[str] = []
        """Under which the value that is made stands."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        alias = self.peek_event() if self.check_event(yaml.AliasEvent) else None
        before = self._num_values
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _fault(f"lists and maps are nested more than {MAX_DEPTH} deep", self.peek_event())
        node = super().compose_node(parent, index)
        self._depth -= 1
        if alias is None:
            self._num_values += 1
            self._size_of[id(node)] = self._num_values - before
        elif id(node) not in self._size_of:
            raise _fault(f"the alias `*{alias.anchor}` is inside the value that it names", alias)
        else:
            self._num_values += self._size_of[id(node)]
        if self._num_values > MAX_VALUES:
            raise _fault(f"it holds more than {MAX_VALUES:,} values, aliases followed", node)
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _fault("a key is a list or a map; give a text", key)
            if key.value in seen:
                raise _fault(f"the key `{key.value[:80]}` appears twice; keep one of them", key)
            seen.add(key.value)
        return node

    def flatten_mapping(self, node: Any) -> None:
        """`<<: *other` lays the keys of the map under those of another."""
        super().flatten_mapping(node)
        if len(node.value) > MAX_VALUES:
            raise _fault("`<<` makes a map without end", node)

    def refusal(self, fault: str, node: Any) -> yaml.YAMLError:
        """The error of a scalar, under its key."""
        key = f"`{'.'.join(self.keys)}`: " if self.keys else ""
        return _fault(f"{key}{fault}", node)


class _Loader(_Bounded):
    """Numbers, booleans and null are those of the core schema."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]
    yaml_constructors: ClassVar[dict[str | None, Any]] = {}  # type: ignore[misc]


class _Texts(_Bounded):
    """Every scalar is a text."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]
    yaml_constructors: ClassVar[dict[str | None, Any]] = {}  # type: ignore[misc]


def _fault(problem: str, where: Any) -> yaml.YAMLError:
    return MarkedYAMLError(problem=problem, problem_mark=where.start_mark)


_TAG = "tag:yaml.org,2002:"
_DIGITS = r"[0-9]+(_[0-9]+)*"
_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", rf"[-+]?{_DIGITS}|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        rf"[-+]?(\.{_DIGITS}|{_DIGITS}\.({_DIGITS})?)([eE][-+]?[0-9]+)?|[-+]?{_DIGITS}[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("merge", r"<<", ["<"]),
)


def _map(loader: _Bounded, node: Any) -> dict[str, Any]:
    loader.flatten_mapping(node)
    values = {}
    for key, value in node.value:
        if not isinstance(loader.construct_object(key, deep=True), str):
            raise loader.refusal(f"the key `{key.value[:80]}` is no text; put it in quotes", key)
        loader.keys.append(key.value[:80])
        values[key.value] = loader.construct_object(value, deep=True)
        loader.keys.pop()
    return values


def _list(loader: _Bounded, node: Any) -> list[Any]:
    return [loader.construct_object(item, deep=True) for item in node.value]


def _int(loader: _Bounded, node: Any) -> int:
    text = node.value.replace("_", "")
    if text[:2] in ("0o", "0x"):
        return int(text[: 2 + 64], 0)
    digits = text.lstrip("+-")
    if not digits.isdigit():
        raise loader.refusal(f"`{node.value[:40]}` is no whole number", node)
    if len(digits) > 1 and digits[0] == "0":
        raise loader.refusal(
            f"`{node.value[:40]}` begins with 0, which some read as octal; write it without, or in quotes if it is a "
            "text",
            node,
        )
    try:
        return whole_number(text)
    except Malformed as error:
        raise loader.refusal(str(error), node) from None


def _float(loader: _Bounded, node: Any) -> float:
    text = node.value.replace("_", "").lower()
    try:
        value = float(text.replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        raise loader.refusal(f"`{node.value[:40]}` is no number", node) from None
    if math.isinf(value) and not text.endswith("inf"):
        raise loader.refusal(f"`{node.value[:40]}` is too large to be finite", node)
    return value


def _text(loader: _Bounded, node: Any) -> str:
    try:
        check_texts(node.value)
    except Malformed as error:
        raise loader.refusal(str(error), node) from None
    return node.value


def _bool(loader: _Bounded, node: Any) -> bool:
    if node.value.lower() not in ("true", "false"):
        raise loader.refusal(f"`{node.value[:40]}` is neither true nor false", node)
    return node.value.lower() == "true"


def _unknown_tag(loader: _Bounded, node: Any) -> Any:
    raise loader.refusal(f"the tag {node.tag[:60]!r} is not known here; remove it", node)


def _set_up() -> None:
    for tag, pattern, first in _SCALARS:
        _Loader.add_implicit_resolver(f"{_TAG}{tag}", re.compile(rf"(?:{pattern})\Z"), first)
    for loader in (_Loader, _Texts):
        loader.add_constructor(f"{_TAG}map", _map)
        loader.add_constructor(f"{_TAG}seq", _list)
        loader.add_constructor(f"{_TAG}str", _text)
        loader.add_constructor(None, _unknown_tag)  # type: ignore[arg-type]
    _Loader.add_constructor(f"{_TAG}null", lambda _, node: None)
    for tag, make in (("bool", _bool), ("int", _int), ("float", _float)):
        _Loader.add_constructor(f"{_TAG}{tag}", make)


_set_up()
