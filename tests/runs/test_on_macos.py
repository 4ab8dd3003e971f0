"""Runs on a system without what only Linux has, in processes that lack it (`tests/on_macos`)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.folder.stored_recipe import recipe_text
from tests.runs.plans import assert_equal_runs
from tests.runs.written import logged

ROOT = Path(__file__).parents[2]
NO_VECTORS = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}


def train(recipe: Recipe, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    file = folder / f"{recipe.run_dir.name}.yaml"
    file.write_text(recipe_text(recipe))
    paths = os.pathsep.join(map(str, (ROOT / "tests/on_macos", ROOT / "src")))
    return subprocess.run(
        [sys.executable, "-m", "plait", "train", str(file)],
        env=os.environ | NO_VECTORS | {"PYTHONPATH": paths, "XDG_CACHE_HOME": str(folder / "cache")} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("place", [{}, {"devices": 2, "plan": "split"}], ids=["one", "split"])
def test_a_run_is_the_same(make_recipe: Callable[..., Recipe], tmp_path: Path, place: dict[str, Any]) -> None:
    keys: dict[str, Any] = {"dtype": "float64", "options": {"kl_coef": 0.05}}
    recipe = make_recipe(run_dir=str(tmp_path / "there"), **keys, **place)
    ended = train(recipe, tmp_path)
    assert ended.returncode == 0, ended.stderr
    here = make_recipe(run_dir=str(tmp_path / "here"), **keys)
    run(here)
    assert_equal_runs(recipe.run_dir, here.run_dir)
    assert logged(recipe)[0]["perf/resident_bytes"] > 1e8


@pytest.mark.slow
def test_ranks_that_python_cannot_look_after_are_refused(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = make_recipe(run_dir=str(tmp_path / "run"), devices=2, plan="colocated")
    ended = train(recipe, tmp_path, AS_ON_MACOS_BEFORE_313="1")
    assert ended.returncode == 2
    assert "error: processes of ranks need Python 3.13 or newer on macOS" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_windows_is_refused_by_its_name() -> None:
    code = "import sys; sys.platform = 'win32'; import plait"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stderr.splitlines()[-1] == (
        "ImportError: plait runs on Linux, and on macOS; on Windows it runs in WSL, the Linux within"
    )
