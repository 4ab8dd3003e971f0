"""What the memory of GPUs is spent on where a recipe leaves that open: on long micro-batches, and on activations that
are kept for the backward.

Both change what a step takes, and no result beyond rounding. A short micro-batch leaves a GPU to wait for launches: on
an H100 the forward of a layer of 1.5 billion parameters takes 2.3 ms for 64 and for 4,096 tokens, and 3.4 for 16,384.
Activations that are not kept are computed once more, a third of a training. So the first of WAYS is taken that fits, by
the forecast of memory; one beside which pools and graphs of generation stay comes before one that drives them out.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from plait.cost.idle_away import has_margin, with_idle_away, with_pools
from plait.cost.placed import Facts
from plait.recipes.open_keys import MEMORY_KEYS
from plait.recipes.recipe import Recipe

LONG = 16_384
"""Tokens of the longest micro-batches: longer ones are not faster."""
WAYS: Sequence[tuple[int, bool]] = (
    (LONG, False),
    (LONG // 2, False),
    (LONG, True),
    (LONG // 2, True),
    (LONG // 4, True),
)
"""Values of `MEMORY_KEYS`, the fastest first."""


def is_open(recipe: Recipe) -> bool:
    """Whether a recipe leaves to a run what memory is spent on."""
    return recipe.device == "cuda" and not all(map(recipe.states, MEMORY_KEYS))


def spent_text(recipe: Recipe) -> str:
    """How training computes, in words."""
    how = "recomputed in the backward" if recipe.checkpoint_activations else "kept for the backward"
    return f"micro-batches of up to {recipe.micro_batch_tokens:,} tokens, whose activations are {how}"


def sparing(recipe: Recipe) -> Recipe:
    """The recipe, which states the way that takes least, as far as it has left that open."""
    return recipe.with_found(**dict(zip(MEMORY_KEYS, WAYS[-1], strict=True)))


def with_memory_spent(facts: Facts, room_bytes: float, *, may_leave: bool, is_alike: bool = True) -> Recipe:
    """The recipe of `facts`, which states the fastest way that fits, as far as it has left open which; one that leaves
    nothing open, or computes on a CPU, as it is.

    Args:
        facts: its plan is completed.
        room_bytes: of one device.
        may_leave: what idles may be in host memory, if not even the last way fits without: no longer micro-batch, and
            nothing kept, is worth that.
        is_alike: all devices are of one kind; where they are not, the way that takes least is taken.
    """
    recipe = facts.recipe
    if not is_open(recipe):
        return recipe
    if not is_alike:
        return sparing(recipe)
    least = facts.spending(_ways(recipe)[-1])
    tried = chain(_tried(facts), _tried_away(facts, least, room_bytes) if may_leave else ())
    found = next((way.recipe for way in tried if has_margin(way, room_bytes)), least.recipe)
    return recipe.with_found(**{key: getattr(found, key) for key in MEMORY_KEYS})


def _tried(facts: Facts) -> Iterator[Facts]:
    """Each way, first with pools and graphs that stay."""
    for planned in (replace(facts, plan=with_pools(facts)), facts):
        yield from map(planned.spending, _ways(facts.recipe))


def _tried_away(facts: Facts, least: Facts, room_bytes: float) -> Iterator[Facts]:
    """With what idles away, each way that keeps no activations (each, where the recipe states that they are kept), if
    `least` has no room without."""
    if with_idle_away(least, room_bytes) == facts.plan:
        return
    ways = _ways(facts.recipe)
    for way in [way for way in ways if way.checkpoint_activations] or ways:
        of_way = facts.spending(way)
        yield replace(of_way, plan=with_idle_away(of_way, room_bytes))


def _ways(recipe: Recipe) -> Sequence[Recipe]:
    """The recipe in each way that it allows."""
    found: dict[tuple[int, bool], Recipe] = {}
    for values in WAYS:
        way = recipe.by_default(**dict(zip(MEMORY_KEYS, values, strict=True)))
        found.setdefault((way.micro_batch_tokens, way.checkpoint_activations), way)
    return list(found.values())
