"""Bytes of an engine where it generates, beside the models of roles: held all the time, and what may come to them.
Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from plait.cost.draft_memory import draft_rows, draft_widened
from plait.cost.estimate import Rows
from plait.cost.generation_memory import EngineBytes, kv_bytes_per_token
from plait.cost.vllm_memory import pool_tokens_of_vllm
from plait.models.shape import ModelShape
from plait.recipes.engine_checks import abilities
from plait.recipes.recipe import Recipe
from plait.training.memory import BYTES

POOL_TOKENS: Mapping[str, Callable[[Recipe, ModelShape], int]] = {"vllm": pool_tokens_of_vllm}
"""`sampling.engine`, where that is another program → tokens whose keys and values it has room for. Raises ConfigError:
the longest sample does not fit."""


def engine_rows(recipe: Recipe, shapes: Mapping[str, ModelShape]) -> Rows:
    """What an engine takes all the time: on our ranks known texts, a draft model and its packed copy; in another
    program weights, keys and values.

    Args:
        shapes: by the model's name.

    Raises:
        ConfigError: the longest sample does not fit into the other program's model, or its keys and values.
    """
    if (program := abilities(recipe).program) is None:
        return draft_rows(recipe, shapes)
    shape, dtype = shapes[recipe.model], recipe.dtype.value
    kept = POOL_TOKENS[recipe.sampling.engine](recipe, shape)
    return [
        (f"weights in {program}'s process", shape.parameters * BYTES[dtype]),
        (f"KV cache of {program}, a pool of {kept} tokens", kept * kv_bytes_per_token(shape, dtype)),
    ]


def engine_bytes(recipe: Recipe, shapes: Mapping[str, ModelShape]) -> EngineBytes:
    """`engine_rows` in all, also for arguments and errors; and what may come to them."""
    held = sum(count for _, count in engine_rows(recipe, shapes))
    return EngineBytes(held, draft_widened(recipe, shapes))
