"""The calls that docs/architecture.md lists are those of a run."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import plait
from plait.generation.engine import Engine
from plait.models.language_model import LanguageModel
from plait.recipes.recipe import Recipe
from plait.runtime.api import run

SOURCES = Path(plait.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
CELL = re.compile(r"^\| `([\w/]+\.py)` (`\w+`(?:, `\w+`)*) \|", re.MULTILINE)


def tables() -> list[list[str]]:
    """`file.py function` of each table of the section, in order."""
    section = PAGE.read_text().partition("## The way down")[2].partition("\n## ")[0]
    parts = section.split("| call | what it does |")[1:]
    return [
        [f"{file} {name}" for file, names in CELL.findall(part) for name in re.findall(r"\w+", names)] for part in parts
    ]


def noting(calls: dict[str, list[str]], inner: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        frames = [frame for frame in traceback.extract_stack() if Path(frame.filename).is_relative_to(SOURCES)]
        said = [f"{Path(frame.filename).relative_to(SOURCES)} {frame.name}" for frame in frames]
        calls.setdefault(inner.__qualname__, said)
        return inner(*args, **kwargs)

    return noted


def test_the_way_down_is_that_of_a_run(make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, list[str]] = {}
    monkeypatch.setattr(LanguageModel, "outputs", noting(calls, LanguageModel.outputs))
    monkeypatch.setattr(Engine, "step", noting(calls, Engine.step))
    run(make_recipe(steps=1))
    driver, score, generate = tables()
    assert calls["LanguageModel.outputs"] == driver + score
    assert calls["Engine.step"] == driver + generate
