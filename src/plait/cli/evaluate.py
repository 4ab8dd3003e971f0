"""`plait eval RECIPE [--model M] [--json] [--key value …]`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from plait.cli import train
from plait.cli.help import Option
from plait.errors import ConfigError

if TYPE_CHECKING:
    from plait.runtime.recipe import Recipe

FLAGS = {"--json": "print the figures as JSON"}

_KEYS = ("--model", "--evaluation.items", "--seed", "--dtype", "--device", "--threads")
_SAMPLING = ("max_response_tokens", "stop", "stop_token_ids", "max_running", "max_prefill_tokens")


def evaluate(*tokens: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> int:
    """Answer a recipe's held-out items, greedily.

    The items are those that training with the same recipe never sees.
    """
    path, overrides, flags = train.read_recipe("eval", tokens, FLAGS)

    from plait.runtime.recipe_file import load_recipe

    recipe = greedy(load_recipe(path, overrides))
    if recipe.evaluation.items == 0:
        raise ConfigError("`evaluation.items` is 0: set how many held-out items to answer (--evaluation.items 100)")
    from plait.runtime.api import evaluate_model

    result = evaluate_model(recipe)
    metrics = {name: value if math.isfinite(value) else None for name, value in result.metrics().items()}
    if "--json" in flags:
        print(json.dumps({"items": len(result.samples), **metrics}, allow_nan=False))
        return 0
    print(f"{len(result.samples)} held-out items, greedy, model {recipe.model}")
    if result.task is not None:
        print(f"exact accuracy                  {result.task.exact or '-'}")
        print(f"well-formed answers             {result.task.well_formed or '-'}")
        print(f"accuracy among the well-formed  {result.task.exact_among_well_formed or '-'}")
    reward = metrics["eval/reward"]
    print(f"mean reward                     {'-' if reward is None else f'{reward:.3f}'}")
    if metrics["eval/dropped"]:
        print(f"items without a score           {metrics['eval/dropped']:.0f}, left out")
    return 0


def greedy(recipe: Recipe) -> Recipe:
    """The recipe without what it says about drawing samples, some of which is refused where one trains."""
    settings = recipe.sampling.model_copy(update={"temperature": 1.0, "top_p": 1.0, "top_k": 0})
    return recipe.model_copy(update={"sampling": settings})


def options() -> Iterator[Option]:
    """Flags, and the keys of a recipe that an evaluation reads; it takes the others too."""
    for flag, text in FLAGS.items():
        yield Option(flag, "", text)
    chosen = (*_KEYS, *(f"--sampling.{name}" for name in _SAMPLING))
    for option in train.options():
        if option.name in chosen or option.name.startswith(("--data.", "--reward.")):
            yield replace(option, default="the recipe's") if option.default == "required" else option
