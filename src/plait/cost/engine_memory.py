"""Bytes that an engine holds all the time where it generates, beside the models of roles. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from plait.cost.draft_memory import draft_weights
from plait.cost.generation_memory import kv_bytes_per_token
from plait.cost.vllm_memory import pool_tokens_of_vllm
from plait.models.shape import ModelShape
from plait.recipes.recipe import Recipe
from plait.training.memory import BYTES


def engine_bytes(recipe: Recipe, shapes: Mapping[str, ModelShape]) -> int:
    """Of plait's a draft model, and the copy of it that is packed; of vLLM its weights, keys and values.

    Args:
        shapes: by the model's name.

    Raises:
        ConfigError: the longest sample does not fit into vLLM's model, or its keys and values.
    """
    if recipe.sampling.engine != "vllm":
        return sum(count for _, count in draft_weights(recipe, shapes))
    shape, dtype = shapes[recipe.model], recipe.dtype.value
    return shape.parameters * BYTES[dtype] + pool_tokens_of_vllm(recipe, shape) * kv_bytes_per_token(shape, dtype)
