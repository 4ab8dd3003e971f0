"""A tiny model as a checkpoint folder, and recipes that train it in a second."""

from __future__ import annotations

import copy
import functools
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from plait.recipes import keys, recipe_file
from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import load_recipe
from plait.runtime.api import run
from plait.yaml_text import parse
from tests.models.tiny import checked_once, save_tiny
from tests.runs.placed_runs import fill, recipe_in

REWARD = """
def count_sevens(completions, **columns):
    return [float(text.count("7")) for text in completions]
"""


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's model, with the settings that MODELS of the module has for it."""
    made, settings = tmp_path_factory.mktemp("families"), getattr(request.module, "MODELS", {})

    def get(family: str) -> Path:
        if not (made / family).exists():
            save_tiny(made / family, family=family, weight_scale=0.05, **settings.get(family, {}))
        return made / family

    return get


@pytest.fixture(autouse=True, scope="module")
def models_are_checked_once() -> Iterator[None]:
    """A quarter of what a tiny run computes is the self-check of its model, which is the same for all."""
    with checked_once():
        yield


@functools.cache
def _parsed(text: str, texts_only: bool) -> Any:
    return parse(text, texts_only=texts_only)


def parsed_once(text: str, *, texts_only: bool = False) -> Any:
    """As `parse`, which reads no text a second time."""
    return copy.deepcopy(_parsed(text, texts_only))


def written_fast(tree: Any, *, sort_keys: bool = True) -> str:
    """As `yaml.safe_dump`, where PyYAML has its other writer: that is in C."""
    return yaml.dump(tree, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=sort_keys)


@pytest.fixture(autouse=True, scope="module")
def texts_are_parsed_once() -> Iterator[None]:
    """A tenth of what a tiny run computes is reading its recipe, key by key and again and again, and as much is writing
    it once."""
    with (
        mock.patch.object(recipe_file, "parse", parsed_once),
        mock.patch.object(keys, "parse", parsed_once),
        mock.patch.object(yaml, "safe_dump", written_fast),
    ):
        yield


@pytest.fixture
def make_recipe(tiny_folder: Path, tmp_path: Path) -> Callable[..., Recipe]:
    """`make_recipe(steps=3, sampling={...})`: a recipe over 12 prompts with a reward of one's own."""
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"what is {i} plus 4?"}) + "\n" for i in range(12))
    )
    (tmp_path / "reward.py").write_text(REWARD)

    def make(**given: Any) -> Recipe:
        tree: dict[str, Any] = {
            "model": str(tiny_folder),
            "steps": 2,
            "prompts_per_step": 3,
            "samples_per_prompt": 4,
            "data.source": str(tmp_path / "prompts.jsonl"),
            "reward.functions": [f"{tmp_path}/reward.py:count_sevens"],
            "sampling.max_response_tokens": 6,
            "optimizer.learning_rate": 1e-3,
            "options": {"kl_coef": 0.05},
            "dtype": "float32",
            "threads": 1,
            "run_dir": str(tmp_path / "run"),
        }
        return load_recipe(None, list((tree | given).items()))

    return make


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """The folder of runs that are compared; see `placed_runs`."""
    folder = tmp_path_factory.mktemp("placements")
    fill(folder, tiny_folder)
    return folder


@pytest.fixture(scope="module")
def placed(place: Path, tiny_folder: Path) -> Callable[..., Recipe]:
    """`placed("grpo", "name of the run", steps=3)`: a recipe in `place`."""
    return functools.partial(recipe_in, place, tiny_folder)


@pytest.fixture(scope="module")
def reference(place: Path, placed: Callable[..., Recipe]) -> Callable[..., Path]:
    """`reference("grpo", steps=3)`: the folder of the run of a flow on one process, run once."""

    def get(flow: str, **keys: Any) -> Path:
        name = f"one-{flow}-{zlib.crc32(repr(sorted(keys.items())).encode()):08x}"
        if not (place / name).exists():
            run(placed(flow, name, **keys))
        return place / name

    return get
