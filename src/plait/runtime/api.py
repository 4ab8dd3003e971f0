"""Run a recipe from Python: `plait.train("recipe.yaml", algorithm=my_flow, reward=my_reward, steps=10)`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plait.errors import ConfigError
from plait.runtime.controller import Outcome
from plait.runtime.controller import train as train_session
from plait.runtime.prepare import prepare
from plait.runtime.recipe import Recipe, load_recipe
from plait.runtime.session import open_session


def train(
    recipe: str | Path | Recipe | None = None,
    *,
    algorithm: str | Callable[..., Any] | None = None,
    reward: str | Callable[..., Any] | None = None,
    resume: bool = False,
    **keys: Any,
) -> Outcome:
    """Train as `plait train RECIPE --key value` does.

    Args:
        recipe: a YAML file, a Recipe, or None to give every key here.
        algorithm: a built-in name, `FILE.py:FUNCTION`, or a flow.
        reward: `FILE.py:FUNCTION`, `package.module:function`, or a function defined at the top level of a file.
        resume: continue the run in `run_dir`.
        keys: recipe keys; a section is a dict (`sampling={"temperature": 0.9}`) and is laid over the recipe's.

    Raises:
        UserError: something in the input cannot be used; nothing was started.
        RunError: the run had to stop.
    """
    overrides = [pair for name, value in keys.items() for pair in _flatten(name, value)]
    if isinstance(algorithm, str):
        overrides.append(("algorithm", algorithm))
    if isinstance(reward, str):
        overrides.append(("reward.functions", [reward]))
    if isinstance(recipe, Recipe):
        if overrides:
            raise ConfigError(f"give keys in the Recipe itself, found {sorted(key for key, _ in overrides)} beside it")
        loaded = recipe
    else:
        loaded = load_recipe(None if recipe is None else Path(recipe), overrides)
    return run(
        loaded,
        resume=resume,
        flow=algorithm if callable(algorithm) else None,
        reward=reward if callable(reward) else None,
    )


def run(
    recipe: Recipe,
    *,
    resume: bool = False,
    flow: Callable[..., Any] | None = None,
    reward: Callable[..., Any] | None = None,
) -> Outcome:
    """Prepare, open, train, close."""
    set_threads(recipe.threads)
    prepared = prepare(recipe, flow=flow, reward=reward)
    with open_session(prepared, resume=resume) as session:
        return train_session(session)


def set_threads(threads: int) -> None:
    """Fix the number of compute threads: the same number gives the same bits. 0: what OMP_NUM_THREADS says, else one
    per core that this process may use."""
    import torch

    asked = threads or int(os.environ.get("OMP_NUM_THREADS", "0")) or len(os.sched_getaffinity(0))
    torch.set_num_threads(asked)


def _flatten(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and name != "options" and not name.endswith(".parameters"):
        return [pair for key, child in value.items() for pair in _flatten(f"{name}.{key}", child)]
    return [(name, value)]
