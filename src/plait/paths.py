"""Paths as users write them, in recipes, in options and in calls: what is replaced in them, one rule for all; and the
folder from which they go on."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, TypeVar

from plait.errors import ConfigError

AnyPath = TypeVar("AnyPath", bound=str | Path)
_VARIABLE = re.compile(r"\$\{|(^|/)\$[A-Za-z_]|\$[A-Z][A-Z_]")
"""What a shell replaces: not every `$` in a name."""


def at_home(path: AnyPath, name: str | None) -> AnyPath:
    """The path with the user's home in place of a `~` that it begins with; a text stays one.

    Args:
        name: what the path is called where a user writes it, with which the message begins; None: who catches the error
            says it.

    Raises:
        ConfigError: it has `${…}` or `$NAME`, which shells and other programs' recipes replace, and which would become
            the name of a folder.
    """
    if _VARIABLE.search(str(path)):
        begin = "" if name is None else f"{name}: "
        raise ConfigError(
            f"{begin}expected a path as it is, in which nothing but a `~` at its beginning is replaced, found "
            f"`{path}`; write out what it stands for"
        )
    return type(path)(os.path.expanduser(path))


def path_key(*keys: str) -> Any:
    """The validator of a settings class for keys that hold a path, or several: `at_home`."""
    from pydantic import field_validator

    return field_validator(*keys)(_every_one_at_home)


def named_folder(key: str) -> Any:
    """The validator of a settings class for the key of a folder that a run writes: an empty text, as of a variable that
    is not set, would be the folder of the command."""
    from pydantic import field_validator

    return field_validator(key, mode="before")(_named)


def _named(value: Any) -> Any:
    if value == "":
        raise ValueError("expected a folder, found an empty text")
    return value


def _every_one_at_home(value: Any) -> Any:
    match value:
        case str() | Path():
            return at_home(value, None)
        case tuple():
            return tuple(map(_every_one_at_home, value))
    return value


def user_cache() -> Path:
    """The folder in which programs keep what they could make again: `$XDG_CACHE_HOME`, else `~/.cache`.

    Raises:
        ConfigError: as of `at_home`.
    """
    return Path(at_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "XDG_CACHE_HOME"))


def working_folder() -> str:
    """The folder in which this process works.

    Raises:
        ConfigError: it is gone; MKL would end the process over that without a word of it.
    """
    try:
        return os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"the folder in which this command was begun cannot be found any more ({error.strerror}); change to one "
            "that is there (`cd`), and begin it again"
        ) from None
