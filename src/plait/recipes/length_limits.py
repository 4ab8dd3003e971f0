"""How long prompts and samples may be, in training and in evaluations, within what a model and its keys and values have
room for. Torch-free."""

from __future__ import annotations

from plait.errors import ConfigError
from plait.models.shape import ModelShape
from plait.policy.blocks import BLOCK_TOKENS
from plait.recipes.evaluation_sets import EvaluationSet, evaluation_sets
from plait.recipes.recipe import Recipe


def prompt_limit(recipe: Recipe, shape: ModelShape) -> int:
    """Most tokens that a prompt may have: `data.max_prompt_tokens`, within what positions and KV pool leave.

    Raises:
        ConfigError: prompt and response together do not fit the model, or the pool of keys and values.
    """
    keys = ("data.max_prompt_tokens", "sampling.max_response_tokens")
    return _prompt_limit(recipe, shape, (recipe.data.max_prompt_tokens, recipe.sampling.max_response_tokens), keys)


def held_out_limit(recipe: Recipe, shape: ModelShape, held_out: EvaluationSet) -> int:
    """Most tokens that a prompt of an evaluation set may have, as `prompt_limit`. Raises ConfigError as that does."""
    source, response = held_out.source or recipe.data, held_out.answering.max_response_tokens
    is_own = held_out.source is not None and source.max_prompt_tokens != recipe.data.max_prompt_tokens
    of_prompts = f"{held_out.section}.max_prompt_tokens" if is_own else "data.max_prompt_tokens"
    is_trainings = response == recipe.sampling.max_response_tokens
    keys = (of_prompts, f"{'sampling' if is_trainings else held_out.section}.max_response_tokens")
    return _prompt_limit(recipe, shape, (source.max_prompt_tokens, response), keys)


def longest_sample(recipe: Recipe, shape: ModelShape) -> int:
    """Tokens of a prompt with its response, at most, in training and in evaluations.

    Raises:
        ConfigError: they do not fit the model, or its keys and values.
    """
    evaluated = (
        held_out_limit(recipe, shape, one) + one.answering.max_response_tokens for one in evaluation_sets(recipe)
    )
    return max((prompt_limit(recipe, shape) + recipe.sampling.max_response_tokens, *evaluated))


def _prompt_limit(recipe: Recipe, shape: ModelShape, most: tuple[int | None, int], keys: tuple[str, str]) -> int:
    """
    Args:
        most: tokens of a prompt (None: nothing is said) and of a response.
        keys: that say them.
    """
    pool = recipe.sampling.num_blocks(shape.max_positions) * BLOCK_TOKENS
    (most_prompt, response), (of_prompts, of_responses) = most, keys
    asked = f"`{of_responses}` ({response}) and a prompt of one token"
    if most_prompt is not None:
        asked = f"`{of_prompts}` ({most_prompt}) + `{of_responses}` ({response})"
    if pool < shape.max_positions and pool - response < (most_prompt or 1):
        raise ConfigError(
            f"{asked} exceed the {pool} tokens of the KV pool (`sampling.kv_tokens` in blocks of {BLOCK_TOKENS}); "
            "raise it, or ask for fewer"
        )
    room = min(pool, shape.max_positions) - response
    if room < 1 or (most_prompt is not None and most_prompt > room):
        raise ConfigError(
            f"{asked} exceed the {shape.max_positions} positions of `{recipe.model}`; lower "
            f"{'one of them' if most_prompt else f'`{of_responses}`'}"
        )
    return most_prompt or room
