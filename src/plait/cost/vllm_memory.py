"""What vLLM makes room for, where it draws the samples."""

from __future__ import annotations

from plait.models.shape import ModelShape
from plait.policy.blocks import BLOCK_TOKENS
from plait.recipes.length_limits import longest_sample
from plait.recipes.recipe import Recipe

PROMPT_TOKENS = 512
"""The length that is expected of prompts where the recipe sets no limit. Longer ones fit, too."""
VLLM_BLOCK_TOKENS = {"cpu": 128, "cuda": 32}
"""Tokens of a block of vLLM, on a GPU at most; the last one of a sample is half empty."""


def pool_tokens_of_vllm(recipe: Recipe, shape: ModelShape) -> int:
    """Tokens whose keys and values it has room for: the longest sample, and all that run at a time, as long as they are
    expected to be; no more of these than `sampling.kv_tokens`.

    Raises:
        ConfigError: as `longest_sample`.
    """
    sampling = recipe.sampling
    expected = (recipe.data.max_prompt_tokens or PROMPT_TOKENS) + sampling.max_response_tokens
    held = sampling.num_blocks(shape.max_positions) * BLOCK_TOKENS
    tokens = max(longest_sample(recipe, shape), min(held, sampling.max_running * expected))
    of_block = VLLM_BLOCK_TOKENS[recipe.device]
    return (-(-tokens // of_block) + sampling.max_running + 1) * of_block
