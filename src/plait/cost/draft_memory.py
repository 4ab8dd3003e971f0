"""Bytes of a draft model: its weights, the copy of them that is packed for decoding, its keys and values. Imports no
torch."""

from __future__ import annotations

from collections.abc import Mapping

from plait.cost.generation_memory import kv_bytes_per_token, packed_bytes
from plait.layout.mesh import Layout
from plait.models.shape import ModelShape
from plait.recipes.recipe import Recipe
from plait.training.memory import BYTES

_LEADER = 0
"""The rank that says what a step begins with, where it has a part in the instance."""


Rows = list[tuple[str, int]]
"""(what, bytes)."""


def draft_weights(recipe: Recipe, shapes: Mapping[str, ModelShape]) -> Rows:
    """What an engine's draft model takes all the time; nothing where there is none.

    Args:
        shapes: by the model's name.
    """
    if recipe.sampling.draft_model is None:
        return []
    shape, dtype = shapes[recipe.sampling.draft_model], recipe.dtype.value
    rows = [(f"draft model: weights ({dtype})", shape.parameters * BYTES[dtype])]
    if recipe.dtype != "float64":
        rows.append(("draft model: weights packed for decoding", packed_bytes(shape, dtype)))
    return rows


def draft_cache(recipe: Recipe, shapes: Mapping[str, ModelShape], kv_tokens: int) -> Rows:
    """What it takes while samples are drawn.

    Args:
        kv_tokens: whose keys and values the engine holds at most at a time.
    """
    if recipe.sampling.draft_model is None:
        return []
    per_token = kv_bytes_per_token(shapes[recipe.sampling.draft_model], recipe.dtype.value)
    return [(f"draft model: KV cache ({kv_tokens} tokens)", kv_tokens * per_token)]


def drafts_on(rank: int, instance: Layout) -> bool:
    """Whether this rank of an instance is the one that has the draft model."""
    ranks = instance.mesh.ranks
    return rank == (_LEADER if _LEADER in ranks else ranks[0])
