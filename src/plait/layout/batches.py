"""Rows of a batch, keys and values, as holdings: what moves between calls, by the same planner as weights.

A *spread* says how a call takes its rows, or gives them: split over some axes of its layout, equal along the others,
or there on one coordinate only. HybridFlow's named transfer protocols (arXiv 2409.19256, table 3) are values of it:

    3D in                Spread(("dp",))                    3D out               Spread(("dp",), tp=0, pp=-1)
    one to all           Spread(())                         dp over all ranks    Spread(("dp", "pp", "tp"))
    per stage            Spread(("pp",))                    stages as dp         Spread(("dp", "pp"))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from plait.errors import LayoutError
from plait.layout.boxes import Box
from plait.layout.holdings import Holdings, packed
from plait.layout.mesh import Layout
from plait.layout.params import Heads, Param
from plait.layout.shards import stage_bounds

Axis = Literal["dp", "pp", "tp"]


@dataclass(frozen=True)
class Spread:
    """split: axes over which rows are divided, slowest first. tp, pp, dp: only ranks with this coordinate have rows;
    -1 is the last; None: all ranks along the axis have the same.
    """

    split: tuple[Axis, ...]
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None

    def slots(self, layout: Layout) -> dict[int, int]:
        """Rank → number of its slot, for the ranks that have rows.

        Raises:
            LayoutError: an axis is both split and pinned, or pinned beyond its size.
        """
        sizes = {"dp": layout.parallelism.dp, "tp": layout.parallelism.tp, "pp": layout.parallelism.pp}
        pinned = {"dp": self.dp, "tp": self.tp, "pp": self.pp}
        for axis, at in pinned.items():
            if at is not None and (axis in self.split or not -sizes[axis] <= at < sizes[axis]):
                raise LayoutError(f"{axis}: expected one of {sizes[axis]} coordinates of an axis not split, found {at}")
        slots = {}
        for rank in layout.mesh.ranks:
            place = layout.coordinates(rank)
            own_coordinates = {"dp": place.dp, "tp": place.tp, "pp": place.pp}
            if all(at is None or own_coordinates[axis] == at % sizes[axis] for axis, at in pinned.items()):
                slot = 0
                for axis in self.split:
                    slot = slot * sizes[axis] + own_coordinates[axis]
                slots[rank] = slot
        return slots

    def num_slots(self, layout: Layout) -> int:
        return 1 + max(self.slots(layout).values())


def row_parameters(num_bytes: Sequence[int]) -> tuple[Param, ...]:
    """Each row as one indivisible string of bytes; a row may be empty."""
    return tuple(Param(f"row/{number}", (size,)) for number, size in enumerate(num_bytes))


def rows(
    params: tuple[Param, ...], layout: Layout, spread: Spread, slot_of: Sequence[int], buffer: str = "rows"
) -> Holdings:
    """Rows as bytes on the ranks of a layout, one after another.

    Args:
        params: as of `row_parameters`.
        slot_of: the slot of each row; slots may hold any number of rows, also none.

    Raises:
        LayoutError: a row has no slot, or one that the layout does not have.
    """
    count = spread.num_slots(layout)
    if len(slot_of) != len(params) or any(not 0 <= slot < count for slot in slot_of):
        raise LayoutError(f"slot_of: expected a slot from 0 to {count - 1} for each of {len(params)} rows")
    of_slot: list[list[tuple[int, Box]]] = [[] for _ in range(count)]
    for number, slot in enumerate(slot_of):
        if params[number].num_elements:
            of_slot[slot].append((number, Box(0, 1, 0, 1, 0, params[number].num_elements)))
    return packed(params, "uint8", {rank: of_slot[slot] for rank, slot in spread.slots(layout).items()}, buffer)


@dataclass(frozen=True)
class LayerCache:
    """Keys [groups, tokens, key_dim] and values [groups, tokens, value_dim] of one layer."""

    layer: int
    groups: int
    """Key-value heads."""
    key_dim: int
    value_dim: int
    cut: bool = True
    """Ranks along tp have heads of their own (or share one); False: each has all of them, where the model gathers."""


@dataclass(frozen=True)
class CacheShape:
    """What a model keeps of its tokens."""

    num_layers: int
    """Layers of the model; those without keys and values are not among `layers`."""
    heads: int
    """Query heads."""
    layers: tuple[LayerCache, ...]

    @classmethod
    def uniform(cls, layers: int, heads: int, groups: int, key_dim: int, value_dim: int) -> CacheShape:
        """All layers alike."""
        return cls(layers, heads, tuple(LayerCache(layer, groups, key_dim, value_dim) for layer in range(layers)))


def cache_parameters(shape: CacheShape, lengths: Sequence[int]) -> tuple[Param, ...]:
    """Keys and values of samples, or of ranges of their tokens: for each and each layer [groups, tokens, dim], cut by
    key-value head."""
    return tuple(
        Param(
            f"kv/{sample}/{layer.layer}/{what}",
            (layer.groups, length, dim),
            layer.layer,
            0 if layer.cut else None,
            heads=Heads(max(shape.heads, layer.groups), layer.groups, shared=True) if layer.cut else None,
        )
        for sample, length in enumerate(lengths)
        for layer in shape.layers
        for what, dim in (("key", layer.key_dim), ("value", layer.value_dim))
    )


def cache(
    params: tuple[Param, ...], shape: CacheShape, instances: Sequence[Layout], dtype: str, buffer: str = "kv"
) -> Holdings:
    """Keys and values on the ranks that compute them: layers by stage, heads by tp.

    An engine whose slots lie elsewhere states its own places as `Holding`s; boxes are what counts.

    Args:
        params: as of `cache_parameters`.
        instances: the instance that has each sample, a layout with dp 1.

    Raises:
        LayoutError: an instance has a dp above 1.
    """
    per_sample = 2 * len(shape.layers)
    boxes: dict[int, list[tuple[int, Box]]] = {}
    for number, param in enumerate(params):
        layout = instances[number // per_sample]
        if layout.parallelism.dp != 1:
            raise LayoutError(f"dp: expected an instance (dp 1) for sample {number // per_sample}, found {layout}")
        bounds = stage_bounds(shape.num_layers, layout.parallelism)
        for rank in layout.mesh.ranks:
            place = layout.coordinates(rank)
            if param.layer is not None and bounds[place.pp] <= param.layer < bounds[place.pp + 1]:
                start, stop = param.tp_range(place.tp, layout.parallelism.tp)
                box = Box(0, 1, start, stop, 0, param.grid[2])
                if box.num_elements:
                    boxes.setdefault(rank, []).append((number, box))
    return packed(params, dtype, boxes, buffer)
