"""The tiny model of the runtime's tests, and a folder for each case."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.frame import Place
from tests.runs.conftest import tiny_folder

__all__ = ["tiny_folder"]


@pytest.fixture
def place(tmp_path: Path, tiny_folder: Path) -> Place:
    folder = tmp_path / "case"
    folder.mkdir()
    return Place(folder, tiny_folder)


@pytest.fixture(autouse=True)
def users_code_is_loaded_anew() -> Iterator[None]:
    yield
    sys.modules.pop("plait_user_mine", None)
