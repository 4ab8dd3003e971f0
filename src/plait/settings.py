"""The one base of all classes of settings: frozen, closed, and strict about kinds of values.

A number is a number: neither `true`, which Python counts as 1, nor a text of digits, nor, where a key does not say so,
infinite or NaN. Whole numbers stay within MOST unless the key states a bound of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Le
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from plait.json_text import is_unicode

MOST = 2**31 - 1
"""The bound of a count that states none of its own."""

Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""What a generator of random numbers takes."""

Endless = Annotated[float, Field(allow_inf_nan=True)]
"""A number that may be infinite. NaN passes no bound."""


class Settings(BaseModel):
    """Keys that a user sets. Unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_of_its_kind(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        field = cls.model_fields[info.field_name]
        kinds = _kinds(field.annotation)
        most = next((m.le for m in field.metadata if isinstance(m, Le) and isinstance(m.le, int)), MOST)
        for leaf in _leaves(value):
            _check(leaf, kinds, most)
        return value

    def check_read(self) -> None:
        """Raises ValueError where a key is set that has no effect without another, which is left off.

        It is no validator: what a run has begun with is read without it (`Recipe.letting_be`).
        """

    def _check_switch(self, switch: str, remedy: str, *keys: str) -> None:
        """Raises ValueError where one of `keys`, which are read with `switch` alone, is set, but `switch` is off by
        itself. Who states that it is off keeps them for another time.

        Args:
            remedy: how it is set.
        """
        if switch in self.model_fields_set or getattr(self, switch) not in _OFF:
            return
        for key in keys:
            if getattr(self, key) != type(self).model_fields[key].get_default():
                raise ValueError(f"{key} is set, but has no effect without {switch}; set {remedy}")


@lru_cache(maxsize=1024)
def _kinds(annotation: Any) -> frozenset[type]:
    """Which of bool, int, float and str a key takes, in lists or alone; object where it takes anything."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kinds(get_args(annotation)[0])
    if origin is Literal:
        return frozenset(type(choice) for choice in get_args(annotation))
    if origin in (Union, UnionType, tuple, list):
        return frozenset(kind for part in get_args(annotation) if part is not ... for kind in _kinds(part))
    if annotation in (bool, int, float):
        return frozenset({annotation})
    if isinstance(annotation, type) and issubclass(annotation, str | Path | Enum):
        return frozenset({str})
    return frozenset() if annotation is type(None) else frozenset({object})


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _check(value: Any, kinds: frozenset[type], most: int) -> None:
    if object in kinds or value is None:
        return
    numbers = kinds & {int, float}
    match value:
        case bool():
            fits = bool in kinds
        case int() | float():
            fits = bool(numbers)
            if fits and float not in kinds and not -most - 1 <= value <= most:
                raise _refusal(f"expected at most {most:,} in size")
        case str():
            fits = str in kinds or (bool in kinds and value.lower() in _SWITCHES)
            if "\0" in value or not is_unicode(value):
                raise _refusal("expected a text without NUL characters and lone surrogates")
        case _:
            return
    if not fits:
        expected = [word for kind, word in _WORDS.items() if kind in kinds and not (kind is int and float in kinds)]
        endless = " (infinity is .inf)" if numbers and str(value).lower() in ("inf", "infinity") else ""
        raise _refusal(f"expected {' or '.join(expected)}{endless}")


def word_or_number(
    words: Sequence[str], kind: type[int] | type[float], fits: Callable[[float], bool], expected: str
) -> BeforeValidator:
    """Check a key that holds one of some words, or a number that `fits`; a command line has numbers as texts."""

    def check(value: Any) -> Any:
        number = value
        if isinstance(value, str):
            if value in words:
                return value
            with contextlib.suppress(ValueError):
                number = kind(value)
        if type(number) in (int, kind) and fits(number):
            return kind(number)
        raise _refusal(f"expected {expected}")

    return BeforeValidator(check)


def what_is_refused(error: ValidationError) -> str:
    """The first key that does not fit, and why."""
    first = error.errors()[0]
    key, why = ".".join(map(str, first["loc"])), said_of_value(first)
    return f"`{key}`: {why}" if key else why


def said_of_value(detail: ErrorDetails) -> str:
    """What a value does not fit, or what was expected in its place, in words for a person."""
    if (expected := _EXPECTED.get(detail["type"])) is not None:
        return f"expected {expected}"
    return detail["msg"][:1].lower() + detail["msg"][1:]


def _refusal(expected: str) -> PydanticCustomError:
    return PydanticCustomError("kind", "{expected}", {"expected": expected})


_OFF = (0, None, "off")
"""Values of a key, False among them, with which those that depend on it are not read."""

_SWITCHES = ("yes", "no", "on", "off", "true", "false")
"""Texts that a key of true or false takes too."""

_WORDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}

_EXPECTED = {
    **dict.fromkeys(("bool_type", "bool_parsing"), _WORDS[bool]),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), _WORDS[int]),
    **dict.fromkeys(("float_type", "float_parsing"), _WORDS[float]),
    "string_type": _WORDS[str],
    "path_type": "a path",
    "tuple_type": "a list",
}
"""Type of an error of pydantic → what takes the place of its own words, which are those of programs."""
