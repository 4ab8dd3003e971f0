"""Keys and values of models whose layers are all alike."""

from __future__ import annotations

from plait.layout.caches import CacheShape, LayerCache


def uniform(layers: int, heads: int, groups: int, key_dim: int, value_dim: int) -> CacheShape:
    return CacheShape(layers, heads, tuple(LayerCache(layer, groups, key_dim, value_dim) for layer in range(layers)))
