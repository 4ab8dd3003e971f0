"""Bytes of what drafts come from: known texts; of a draft model its weights, the copy of them that is packed for
decoding, its keys and values. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from plait.cost.estimate import Rows
from plait.cost.generation_memory import kv_bytes_per_token, packed_bytes, widened_bytes
from plait.layout.mesh import Layout
from plait.models.shape import ModelShape
from plait.recipes.engine_checks import drafts_whole, speculates
from plait.recipes.recipe import Recipe
from plait.training.memory import BYTES

_LEADER = 0
"""The rank that says what a step begins with, where it has a part in the instance."""


def draft_rows(recipe: Recipe, shapes: Mapping[str, ModelShape]) -> Rows:
    """What an engine that drafts takes all the time; nothing where none does.

    Args:
        shapes: by the model's name.
    """
    if not speculates(recipe):
        return []
    of_device = recipe.device == "cpu"  # a GPU's texts are in its host's memory
    rows = [("texts that drafts are taken from, at most", recipe.sampling.draft_pool_bytes)] if of_device else []
    if recipe.sampling.draft_model is None:
        return rows
    shape, dtype = shapes[recipe.sampling.draft_model], recipe.dtype.value
    rows.append((f"draft model: weights ({dtype})", shape.parameters * BYTES[dtype]))
    if packed := _packed_draft(recipe, shapes):
        rows.append(("draft model: weights packed for decoding", packed))
    return rows


def draft_widened(recipe: Recipe, shapes: Mapping[str, ModelShape]) -> int:
    """Bytes that an engine which drafts may take on top of `draft_rows`, all the time: see `widened_bytes`."""
    return widened_bytes(_packed_draft(recipe, shapes), recipe.dtype.value)


def _packed_draft(recipe: Recipe, shapes: Mapping[str, ModelShape]) -> int:
    """Bytes of a draft model's weights once more, as a CPU's forwards read them; 0: there is none, or no copy."""
    name = recipe.sampling.draft_model
    if name is None or not speculates(recipe) or recipe.device != "cpu" or recipe.dtype == "float64":
        return 0
    return packed_bytes(shapes[name], recipe.dtype.value)


def draft_cache(recipe: Recipe, shapes: Mapping[str, ModelShape], kv_tokens: int) -> Rows:
    """What it takes while samples are drawn.

    Args:
        kv_tokens: whose keys and values the engine holds at most at a time.
    """
    if recipe.sampling.draft_model is None:
        return []
    per_token = kv_bytes_per_token(shapes[recipe.sampling.draft_model], recipe.dtype.value)
    return [(f"draft model: KV cache ({kv_tokens} tokens)", kv_tokens * per_token)]


def drafts_on(recipe: Recipe, rank: int, instance: Layout) -> bool:
    """Whether this rank of an instance is the one that drafts, with the draft model if there is one."""
    ranks = instance.mesh.ranks
    is_drafted = speculates(recipe) and (len(ranks) == 1 or not drafts_whole(recipe))
    return is_drafted and rank == (_LEADER if _LEADER in ranks else ranks[0])
