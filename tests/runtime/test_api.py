"""`plait.train` from Python: what it takes as a recipe, a flow and rewards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import plait
from plait.errors import ConfigError
from plait.recipes.recipe import Recipe
from plait.runtime import api
from plait.runtime.api import path_of


def halved(function: Callable[..., list[float]]) -> Callable[..., list[float]]:
    @functools.wraps(function)
    def half(*arguments: Any, **columns: Any) -> list[float]:
        return [score / 2 for score in function(*arguments, **columns)]

    return half


def sevens(completions: list[str], **_: Any) -> list[float]:
    return [float(text.count("7")) for text in completions]


def test_functions_go_by_their_files() -> None:
    assert path_of(sevens) == f"{__file__}:sevens"


def test_a_decorated_function_goes_by_the_file_that_defines_it(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "decorated.py").write_text(
        "from tests.runtime.test_api import halved\n@halved\ndef ones(completions, **_): return [1.0]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from decorated import ones  # pyright: ignore[reportMissingImports]

    assert path_of(ones) == f"{tmp_path}/decorated.py:ones"


@pytest.mark.parametrize(
    "function",
    [
        lambda completions, **_: [1.0],
        halved(lambda completions, **_: [1.0]),
        halved(sevens),
        functools.partial(sevens, weight=2),
        5,
    ],
    ids=("a lambda", "a wrapped lambda", "a wrapper", "a partial", "a number"),
)
def test_what_no_path_can_name_is_refused(function: Any) -> None:
    """A wrapper that has another name than what it wraps would be computed without."""
    with pytest.raises(ConfigError, match=r"cannot be named in a recipe: give a function that is defined at the top"):
        plait.train(model="m", data={"source": "d.jsonl"}, reward=function)


def test_rewards_may_be_several(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Recipe] = []
    monkeypatch.setattr(api, "run", lambda recipe, **_: asked.append(recipe))
    plait.train(model="m", data={"source": "d.jsonl"}, reward=[sevens, "mine.rewards:brief"])
    assert list(asked[0].reward.functions) == [f"{__file__}:sevens", "mine.rewards:brief"]


def test_a_reward_may_be_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Recipe] = []
    monkeypatch.setattr(api, "run", lambda recipe, **_: asked.append(recipe))
    section = {"functions": [sevens, "mine.rewards:brief"], "weights": [2.0, 1.0], "timeout_s": 5.0}
    for reward in (section, section | {"functions": sevens, "weights": [1.0]}, {"timeout_s": 3.0}):
        plait.train(model="m", data={"source": "reasoning_gym:leg_counting"}, reward=reward)
    several, one, none = (recipe.reward for recipe in asked)
    assert list(several.functions) == [f"{__file__}:sevens", "mine.rewards:brief"]
    assert (several.weights, several.timeout_s) == ((2.0, 1.0), 5.0)
    assert (list(one.functions), one.timeout_s) == ([f"{__file__}:sevens"], 5.0)
    assert (list(none.functions), none.timeout_s) == ([], 3.0)
    with pytest.raises(ConfigError, match="timeout_s"):
        plait.train(model="m", data={"source": "d.jsonl"}, reward={"functions": sevens, "timeout": 5})


def test_a_recipe_is_a_path_or_keys() -> None:
    with pytest.raises(ConfigError, match="expected the path of a recipe, or its keys as arguments, found a dict"):
        plait.train({"model": "m"})  # type: ignore[arg-type]
