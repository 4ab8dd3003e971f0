"""Wheels in a local folder, the only place where pip may look."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest


def write_wheel(folder: Path, name: str, version: str, files: Mapping[str, bytes]) -> Path:
    """A wheel of the package `name` with these files, by their paths in it."""
    module = name.replace("-", "_")
    path = folder / f"{module}-{version}-py3-none-any.whl"
    about = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, content in files.items():
            archive.writestr(inside, content)
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return path


def look_only_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on pip takes packages from this folder, whatever its configuration says."""
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
