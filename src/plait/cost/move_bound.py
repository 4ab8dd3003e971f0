"""A lower bound of what a move of weights takes, quick enough for a search over many devices: what each device and node
lacks, over its links. Messages, their order and latencies are left out; the rest of the costs is exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from plait.cost.costs import CallCost, MoveCost, Spread
from plait.layout.mesh import Layout
from plait.layout.shards import stage_bounds

if TYPE_CHECKING:
    from plait.cost.model_costs import ModelCosts

LARGE = 16
"""Devices beyond which a search takes the bound."""


class BoundedMoves:
    """`costs.Costs`: those of a model, but for moves."""

    def __init__(self, costs: ModelCosts) -> None:
        self._costs = costs
        self.cluster, self.pool_takes_rest = costs.cluster, costs.pool_takes_rest
        self.process_terms, self.slack = costs.process_terms, costs.slack
        self.engine_bytes, self.keeps_freed = costs.engine_bytes, costs.keeps_freed
        self.connections = costs.connections
        self.move = cache(self._move)

    @property
    def call(self) -> Callable[..., CallCost]:
        """See `Costs.call`."""
        return self._costs.call

    @property
    def working_bytes(self) -> Callable[..., tuple[int, ...]]:
        """See `Costs.working_bytes`."""
        return self._costs.working_bytes

    def generation(self, call: str, layout: Layout, spread: Spread, held_bytes: tuple[int, ...]) -> CallCost:
        return self._costs.generation(call, layout, spread, held_bytes)

    def offload(self, role: str, layout: Layout, what: Literal["weights", "state"]) -> MoveCost:
        return self._costs.offload(role, layout, what)

    def held_bytes(self, role: str, layout: Layout, *, trained: bool) -> tuple[int, ...]:
        return self._costs.held_bytes(role, layout, trained=trained)

    def _move(self, role: str, source: Layout, target: Layout) -> MoveCost:
        if source == target:
            return MoveCost(0.0, {}, 0)
        layers = self._costs.shapes[role].layers
        num_bytes = self._costs.moved_bytes(role)
        into_devices, into_nodes = lacking(layers, source, target, self.cluster.devices_per_node)
        cluster = self.cluster.among((*source.mesh.ranks, *target.mesh.ranks))
        share = cluster.software.links
        near = float(into_devices.max()) * num_bytes / (cluster.near.bandwidth * share)
        far = float(into_nodes.max()) * num_bytes / (cluster.inter.bandwidth * share)
        terms = {"links": max(near, far), "switching": cluster.software.switch_s}
        return MoveCost(sum(terms.values()), terms, int(into_devices.sum() * num_bytes))


def lacking(layers: int, source: Layout, target: Layout, per_node: int) -> tuple[np.ndarray, np.ndarray]:
    """(of each device, of each node) the share of a model of equal layers that it needs and does not hold; [devices]
    and [nodes], float64."""
    nodes = 1 + max(*source.mesh.ranks, *target.mesh.ranks) // per_node
    cuts = sorted({*stage_bounds(layers, source.parallelism), *stage_bounds(layers, target.parallelism)})
    ways = int(np.lcm(source.parallelism.tp, target.parallelism.tp))
    held, needed = (_cells(layout, layers, cuts, ways, nodes * per_node) for layout in (source, target))
    size = np.diff(cuts)[:, None] / layers / ways
    missing = needed & ~held
    by_node = lambda cells: cells.reshape(nodes, per_node, *cells.shape[1:]).any(axis=1)
    into_node = by_node(needed) & ~by_node(held)
    return (missing * size).sum(axis=(1, 2)), (into_node * size).sum(axis=(1, 2))


def _cells(layout: Layout, layers: int, cuts: list[int], ways: int, ranks: int) -> np.ndarray:
    """[ranks, layers between cuts, ways] whether a rank has that part of the model."""
    sizes, bounds = layout.parallelism, stage_bounds(layers, layout.parallelism)
    number = np.arange(len(layout.mesh.ranks))
    stage_of = np.repeat(np.arange(sizes.pp), np.diff([cuts.index(bound) for bound in bounds]))
    of_stage = stage_of == (number // sizes.tp % sizes.pp)[:, None]
    of_way = np.arange(ways) // (ways // sizes.tp) == (number % sizes.tp)[:, None]
    cells = np.zeros((ranks, len(cuts) - 1, ways), bool)
    cells[list(layout.mesh.ranks)] = of_stage[:, :, None] & of_way[:, None, :]
    return cells
