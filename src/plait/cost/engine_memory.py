"""Bytes of an engine where it generates, beside the models of roles: held all the time, and what may come to them.
Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from plait.cost.draft_memory import draft_rows, draft_widened
from plait.cost.estimate import Rows
from plait.cost.generation_memory import EngineBytes, kv_bytes_per_token
from plait.cost.vllm_memory import pool_tokens_of_vllm
from plait.models.shape import ModelShape
from plait.recipes.engine_checks import abilities, drafts_whole
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel
from plait.training.memory import BYTES

POOL_TOKENS: Mapping[str, Callable[[Recipe, ModelShape], int]] = {"vllm": pool_tokens_of_vllm}
"""`sampling.engine`, where that is another program → tokens whose keys and values it has room for. Raises ConfigError:
the longest sample does not fit."""


def engine_rows(recipe: Recipe, shapes: Mapping[str, ModelShape], name: str) -> Rows:
    """What the engine of a role takes all the time: on our ranks known texts, a draft model and its packed copy; in
    another program weights, keys and values.

    Args:
        shapes: by the model's name.
        name: of the role's model.

    Raises:
        ConfigError: the longest sample does not fit into the other program's model, or its keys and values.
    """
    if (program := abilities(recipe).program) is None:
        return draft_rows(recipe, shapes)
    shape, dtype = shapes[name], recipe.dtype.value
    kept = POOL_TOKENS[recipe.sampling.engine](recipe, shape)
    return [
        (f"weights in {program}'s process", shape.parameters * BYTES[dtype]),
        (f"KV cache of {program}, a pool of {kept} tokens", kept * kv_bytes_per_token(shape, dtype)),
    ]


def engine_bytes(
    recipe: Recipe, shapes: Mapping[str, ModelShape], models: Sequence[RoleModel]
) -> dict[str, EngineBytes]:
    """Role that generates → `engine_rows` of its engine in all, also for errors; and what may come to them.

    Args:
        models: of the roles that generate.
    """
    widened = draft_widened(recipe, shapes)
    held = {model.role: engine_rows(recipe, shapes, model.name) for model in models}
    is_whole = drafts_whole(recipe)
    return {role: EngineBytes(sum(count for _, count in rows), widened, is_whole) for role, rows in held.items()}
