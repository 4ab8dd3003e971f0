"""Starts the processes of a recipe's reward functions and judges, and of the function that replies between turns."""

from __future__ import annotations

import contextlib
from pathlib import Path

from plait.observe.loading import loading
from plait.rewards.pool import RewardPool
from plait.rewards.replies import reply_function
from plait.runtime.inputs.prepared import Prepared

REPLIES = "replies"
"""The pool of the function that replies (`turns.reply`)."""


def open_pools(prepared: Prepared, stack: contextlib.ExitStack, output: Path | None = None) -> dict[str, RewardPool]:
    """Start the recipe's functions: they are loaded, and the data have every column that they need.

    Args:
        stack: closes the pools.

    Returns:
        Reward role → its pool; the functions that judge evaluations under `judges`, the one that replies under REPLIES.

    Raises:
        ConfigError: a function cannot be loaded, or a column is missing.
    """
    recipe = prepared.recipe
    pools: dict[str, RewardPool] = {}
    for name, functions in {**prepared.functions, "judges": prepared.judges}.items():
        if not functions:
            continue
        loading(f"functions of {name}")
        settings = recipe.cost if name == "cost" else recipe.reward  # judges have the limits of rewards
        pools[name] = pool = stack.enter_context(
            RewardPool(
                functions,
                timeout_s=settings.timeout_s,
                workers=settings.workers,
                at_once=settings.at_once,
                on_error=settings.on_error,
                seed=recipe.seed,
                output=output,
                memory_gb=settings.memory_gb,
            )
        )
        pool.start(columns=prepared.columns or None)
    if recipe.turns.reply is not None:
        loading("the function that replies")
        replies = RewardPool(
            (reply_function(recipe.turns.reply),),
            timeout_s=recipe.turns.timeout_s,
            workers=recipe.turns.workers,
            at_once=recipe.turns.at_once,
            on_error=recipe.turns.on_error,
            seed=recipe.seed,
            output=output,
        )
        pools[REPLIES] = stack.enter_context(replies)
        replies.start(columns=prepared.columns or None)
    return pools
