"""Paths as users write them, in recipes, in options and in calls: what is replaced in them, one rule for all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from plait.errors import ConfigError

AnyPath = TypeVar("AnyPath", bound=str | Path)


def at_home(path: AnyPath) -> AnyPath:
    """The path with the user's home in place of a `~` that it begins with; a text stays one.

    Raises:
        ConfigError: it has `${…}`, which other programs' recipes replace, and which would become the name of a folder.
    """
    if "${" in str(path):
        raise ConfigError(
            f"expected a path as it is, in which nothing but a `~` at its beginning is replaced, found `{path}`"
        )
    return type(path)(os.path.expanduser(path))
