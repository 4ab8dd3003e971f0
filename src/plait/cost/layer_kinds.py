"""Layers of a model that are unlike: dense blocks beside mixtures of experts, windows beside attention over all, states
beside keys and values.

What a layer takes is said of models whose layers are all alike (`ModelWork`, `working_memory`), so a model of several
kinds of layers is as many such models, each with a part of its layers. Torch-free.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from plait.layout.mesh import Parallelism
from plait.layout.shards import stage_bounds
from plait.models.shape import ModelShape


@dataclass(frozen=True)
class LayerKind:
    """shape: of the model if all of its layers were of this kind; layers: numbers of those that are, ascending"""

    shape: ModelShape
    layers: tuple[int, ...]


@lru_cache(maxsize=64)
def layer_kinds(shape: ModelShape) -> tuple[LayerKind, ...]:
    """The kinds of a model's layers, in the order of their first layers. A model whose layers are alike has one kind,
    with the shape itself; so has one with dense blocks and mixtures if the shape does not say which layers are which:
    each layer then counts as the average."""
    numbers: dict[tuple[bool, int, bool, bool, bool], list[int]] = {}
    for layer in range(shape.layers):
        window = shape.windows[layer] if shape.windows else 0
        of_layer = layer in shape.recurrent, shape.attending_in(layer, layer + 1) > 0, layer in shape.without_mlp
        numbers.setdefault((layer in shape.mixtures, window, *of_layer), []).append(layer)
    if len(numbers) == 1:
        return (LayerKind(shape, tuple(range(shape.layers))),)
    kinds = []
    every = tuple(range(shape.layers))
    for (is_mixture, window, is_recurrent, attends, is_bare), layers in numbers.items():
        mixtures = shape.layers * is_mixture if shape.mixtures else shape.expert_layers
        windows = (window,) * shape.layers if window else ()
        alike = replace(
            shape,
            expert_layers=mixtures,
            mixtures=(),
            windows=windows,
            recurrent=every if is_recurrent else (),
            attends=None if attends != is_recurrent else every if attends else (),
            without_mlp=every if is_bare else (),
        )
        kinds.append(LayerKind(alike, tuple(layers)))
    return tuple(kinds)


def stage_counts(shape: ModelShape, sizes: Parallelism) -> tuple[tuple[int, ...], ...]:
    """How many layers of each kind each pipeline stage has."""
    kinds = layer_kinds(shape)
    return tuple(
        tuple(bisect_left(kind.layers, stop) - bisect_left(kind.layers, start) for kind in kinds)
        for start, stop in pairwise(stage_bounds(shape.layers, sizes))
    )
