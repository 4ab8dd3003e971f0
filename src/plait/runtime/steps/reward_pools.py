"""Starts the processes of a recipe's functions: those that reward, those of evaluations, and the one that replies."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.observe.loading import loading
from plait.recipes.role_models import reward_settings
from plait.rewards.functions import RewardFunction
from plait.rewards.pool import RewardPool
from plait.rewards.replies import reply_function, tools_function
from plait.rewards.settings import RewardSettings, TurnSettings
from plait.runtime.inputs.prepared import Prepared


@dataclass(frozen=True)
class Pools:
    """The functions of a recipe, each set of them in worker processes of its own."""

    rewards: Mapping[str, RewardPool]
    """Reward role → its functions; a role that a model alone scores is not there."""
    eval_functions: RewardPool | None
    """Functions of evaluations (`evaluation.functions`); None: there are none."""
    replies: RewardPool | None
    """The function that replies between turns (`turns.reply`), or tools as one; None: nothing replies."""

    @property
    def all(self) -> tuple[RewardPool, ...]:
        return (*self.rewards.values(), *(pool for pool in (self.replies, self.eval_functions) if pool is not None))


def open_pools(prepared: Prepared, stack: contextlib.ExitStack, output: Path | None = None) -> Pools:
    """Start the recipe's functions, so that they are loaded, and see that the data have every column that they need.

    Args:
        stack: closes the pools.
        output: file for what the functions print; None: it goes where this process prints.

    Raises:
        ConfigError: a function cannot be loaded, or a column is missing.
    """
    recipe = prepared.recipe

    def opened(
        title: str, functions: Sequence[RewardFunction], settings: RewardSettings | TurnSettings
    ) -> RewardPool | None:
        if not functions:
            return None
        loading(title)
        pool = RewardPool(functions, settings, seed=recipe.seed, output=output)
        stack.enter_context(pool).start(columns=prepared.columns or None)
        for held_out in prepared.held_out:
            if held_out.prompts:
                pool.check_columns(held_out.columns, held_out.title)
        return pool

    rewards: dict[str, RewardPool] = {}
    for role, functions in prepared.functions.items():
        if (pool := opened(f"functions of {role}", functions, reward_settings(role, recipe))) is not None:
            rewards[role] = pool
    eval_functions = opened("functions of evaluations", prepared.eval_functions, recipe.reward)
    reply: tuple[RewardFunction, ...] = ()
    if recipe.turns.reply is not None:
        reply = (reply_function(recipe.turns.reply),)
    elif prepared.tools is not None:
        reply = (tools_function(recipe.turns.tools, prepared.tools),)
    return Pools(rewards, eval_functions, opened("the function that replies", reply, recipe.turns))
