"""Keys and values of samples, as holdings: they move between instances by the same planner as weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from plait.errors import LayoutError
from plait.layout.boxes import Box
from plait.layout.holdings import Holdings, packed
from plait.layout.mesh import Layout
from plait.layout.params import Heads, Param
from plait.layout.shards import stage_bounds


@dataclass(frozen=True)
class LayerCache:
    """Keys [groups, tokens, key_dim] and values [groups, tokens, value_dim] of one layer."""

    layer: int
    groups: int
    """Key-value heads."""
    key_dim: int
    value_dim: int
    cut: bool = True
    """Whether ranks along tp have heads of their own (or share one); False: each has all heads, as the model
    gathers."""
    experts: int = 0
    """Experts of each token that are kept beside them, on every rank along tp; 0: none are."""


@dataclass(frozen=True)
class CacheShape:
    """What a model keeps of its tokens."""

    num_layers: int
    """Layers of the model; those without keys and values are not among `layers`."""
    heads: int
    """Query heads."""
    layers: tuple[LayerCache, ...]

    @property
    def parts(self) -> tuple[tuple[LayerCache, What], ...]:
        """What is kept of each token, in order."""
        return tuple(
            (layer, what) for layer in self.layers for what in What if what is not What.EXPERTS or layer.experts
        )


class What(StrEnum):
    """What is kept of the tokens of a layer."""

    KEY = "key"
    VALUE = "value"
    EXPERTS = "experts"
    """Their numbers, as bits of the dtype of keys and values."""

    def dim(self, layer: LayerCache) -> int:
        """Numbers of a token, of each group."""
        match self:
            case What.KEY:
                return layer.key_dim
            case What.VALUE:
                return layer.value_dim
            case What.EXPERTS:
                return layer.experts


def cache_parameters(shape: CacheShape, lengths: Sequence[int]) -> tuple[Param, ...]:
    """Keys and values of samples, or of ranges of their tokens: for each and each layer [groups, tokens, dim], cut by
    key-value head; and [1, tokens, experts] where those are kept."""
    return tuple(
        _parameter(f"kv/{sample}/{layer.layer}/{what}", layer, what, length, shape.heads)
        for sample, length in enumerate(lengths)
        for layer, what in shape.parts
    )


def _parameter(name: str, layer: LayerCache, what: What, length: int, heads: int) -> Param:
    if what is What.EXPERTS:
        return Param(name, (1, length, layer.experts), layer.layer)
    sizes = (layer.groups, length, what.dim(layer))
    if not layer.cut:
        return Param(name, sizes, layer.layer)
    return Param(name, sizes, layer.layer, 0, heads=Heads(max(heads, layer.groups), layer.groups, shared=True))


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
    per_sample = len(shape.parts)
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
