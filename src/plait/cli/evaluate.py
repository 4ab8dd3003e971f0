"""`plait eval RECIPE [--model M] [--key value …]`."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter

from plait.cli.train import split_recipe
from plait.errors import ConfigError


def evaluate(
    *tokens: Annotated[str, Parameter(allow_leading_hyphen=True)],
) -> int:
    """Answer a recipe's held-out items: `plait eval RECIPE [--model FOLDER] [--json] [--key value …]`.

    The items are those that training with the same recipe never sees; answers are greedy.
    """
    arguments = list(tokens)
    as_json = "--json" in arguments
    recipe_path, overrides = split_recipe([token for token in arguments if token != "--json"])

    from plait.runtime.recipe import load_recipe

    recipe = load_recipe(recipe_path, overrides)
    if recipe.evaluation.items == 0:
        raise ConfigError("`evaluation.items` is 0: set how many held-out items to answer")
    from plait.runtime.api import evaluate_model

    result = evaluate_model(recipe)
    metrics = result.metrics()
    if as_json:
        print(json.dumps({"items": len(result.samples), **metrics}))
        return 0
    print(f"{len(result.samples)} held-out items, greedy, model {recipe.model}")
    if result.task is not None:
        print(f"exact accuracy                  {result.task.exact}")
        print(f"well-formed answers             {result.task.well_formed}")
        print(f"accuracy among the well-formed  {result.task.exact_among_well_formed or '-'}")
    print(f"mean reward                     {metrics['eval/reward']:.3f}")
    return 0
