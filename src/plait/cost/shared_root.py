"""How much of what all prompts begin with an engine computes, and holds, once. Imports no torch."""

from __future__ import annotations

from plait.cost.lengths import Lengths
from plait.policy.blocks import BLOCK_TOKENS
from plait.recipes.engine_checks import abilities
from plait.recipes.recipe import Recipe


def shared_root(recipe: Recipe, prompts: Lengths) -> int:
    """Tokens that all prompts begin with which an engine computes once: whole blocks; none where another program draws,
    whose blocks are its own."""
    return 0 if abilities(recipe).computes_elsewhere else prompts.root // BLOCK_TOKENS * BLOCK_TOKENS


def held_root(recipe: Recipe, prompts: Lengths) -> int:
    """Those of `shared_root` whose keys and values all samples hold together at any time; none where samples go on with
    what older weights computed, each with its own, or in turns, where some of what has ended stays beside them."""
    apart = recipe.update_rule.keeps or recipe.turns.replier is not None
    return 0 if apart else shared_root(recipe, prompts)
