"""Which of its options a flow reads while it is traced: a key that is set and that nobody reads does nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from collections.abc import Iterator
from typing import Any


class OptionReads:
    """Use `watching` around a call of the flow; `unread` is then what it left alone."""

    def __init__(self, options: Any) -> None:
        """Watch nothing yet.

        Args:
            options: a pydantic model, a dataclass, or None: there are none.
        """
        self._options = options
        self._names = _fields(type(options))
        self._read: set[str] = set()
        self._is_passed_on = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While inside, reads are noted, also those of properties and of functions that the options are given to."""
        plain = type(self._options)
        holders = sys.getrefcount(self._options)
        try:
            object.__setattr__(self._options, "__class__", _watched(plain, self._read))
        except TypeError:  # a class that cannot be extended, or None
            self._is_passed_on = True
            yield
            return
        try:
            yield
        finally:
            object.__setattr__(self._options, "__class__", plain)
        self._is_passed_on = sys.getrefcount(self._options) > holders

    @property
    def unread(self) -> tuple[str, ...]:
        """Names of the options that were not read, and will not be: none where the flow keeps the object itself for
        later (for its loss), or has looked at all of it at once (`vars`, `model_dump`)."""
        if self._is_passed_on or self._read & _WHOLE:
            return ()
        return tuple(name for name in self._names if name not in self._read)


_WHOLE = {"__dict__", "model_dump", "model_dump_json", "model_copy", "dict", "copy", "__iter__", "__reduce_ex__"}
"""Attributes by which all options are read."""


def _fields(cls: type[Any]) -> tuple[str, ...]:
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls))
    return tuple(getattr(cls, "model_fields", ()))


def _watched(cls: type[Any], read: set[str]) -> type[Any]:
    """A class that differs from `cls` by noting what of an instance is read."""

    def look(self: Any, name: str) -> Any:
        read.add(name)
        return super(watched, self).__getattribute__(name)

    body = {"__slots__": (), "__module__": cls.__module__, "__getattribute__": look}
    watched = types.new_class(cls.__name__, (cls,), exec_body=lambda names: names.update(body))
    return watched
