"""The files that a command is asked to write, seen before it works."""

from __future__ import annotations

import os
from pathlib import Path

from plait.errors import ConfigError
from plait.output import check_file


def check_picture(path: Path, option: str) -> None:
    """Raises ConfigError where the name of a file says that it is another picture than an SVG."""
    if path.suffix.lower() != ".svg":
        raise ConfigError(f"{option}: pictures are SVG; give a name that ends in .svg, found `{path}`")


def files_of(overwrite: bool, **paths: Path | None) -> dict[str, Path]:
    """The files that are asked for, by option.

    Raises:
        ConfigError: a file cannot be written, or two options name the same file.
    """
    files = {option: path for option, path in paths.items() if path is not None}
    for option, path in files.items():
        if not os.path.isdir(path.parent):
            raise ConfigError(f"--{option}: expected a file in an existing folder, found {path}")
        if option == "picture":
            check_picture(path, "--picture")
        check_file(path, f"--{option}", overwrite=overwrite)
    if len({os.path.realpath(path) for path in files.values()}) < len(files):
        raise ConfigError(f"expected a file each for {', '.join(f'--{option}' for option in files)}, found one twice")
    return files
