"""What the memory of GPUs is spent on where a recipe leaves that open: on long micro-batches, and on activations that
are kept for the backward.

Both change what a step takes, and no result beyond rounding. A short micro-batch leaves a GPU to wait for launches: on
an H100 the forward of a layer of 1.5 billion parameters takes 2.3 ms for 64 and for 4,096 tokens, and 3.4 for 16,384.
Activations that are not kept are computed once more, a third of a training. So the first of WAYS is taken that fits, by
the forecast of memory; one beside which pools and graphs of generation stay comes before one that drives them out.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from plait.cost.idle_away import has_margin, with_idle_away, with_pools
from plait.cost.placed import Facts
from plait.recipes.open_keys import MEMORY_KEYS
from plait.recipes.recipe import Recipe
from plait.schedule.plan import Plan

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


def with_memory_spent(facts: Facts, room_bytes: float, *, may_leave: bool) -> Recipe:
    """The recipe of `facts`, which states the fastest way that fits, as far as it has left open which; that of a CPU as
    it is.

    Args:
        facts: its plan is completed.
        room_bytes: of one device.
        may_leave: what idles may be in host memory, if not even the last way fits without: no longer micro-batch, and
            nothing kept, is worth that.
    """
    recipe = facts.recipe
    if recipe.device != "cuda":
        return recipe
    ways = _ways(recipe)
    sparing = [way for way in ways if way.checkpoint_activations] or ways
    tests: list[tuple[Sequence[Recipe], Callable[[Facts], Plan]]] = [(ways, with_pools), (ways, lambda of: of.plan)]
    least = replace(facts, recipe=sparing[-1])
    if may_leave and with_idle_away(least, room_bytes) != facts.plan:
        tests.append((sparing, lambda of: with_idle_away(of, room_bytes)))
    found = next(_fitting(facts, room_bytes, tests), sparing[-1])
    return recipe.with_found(**{key: getattr(found, key) for key in MEMORY_KEYS})


def _ways(recipe: Recipe) -> Sequence[Recipe]:
    """The recipe in each way that it allows."""
    found: dict[tuple[int, bool], Recipe] = {}
    for values in WAYS:
        way = recipe.by_default(**dict(zip(MEMORY_KEYS, values, strict=True)))
        found.setdefault((way.micro_batch_tokens, way.checkpoint_activations), way)
    return list(found.values())


def _fitting(
    facts: Facts, room_bytes: float, tests: Sequence[tuple[Sequence[Recipe], Callable[[Facts], Plan]]]
) -> Iterator[Recipe]:
    """The ways that have room with the plan that is followed then."""
    for ways, planned in tests:
        for way in ways:
            of_way = replace(facts, recipe=way)
            if has_margin(replace(of_way, plan=planned(of_way)), room_bytes):
                yield way
