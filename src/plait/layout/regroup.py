"""Which rank takes which place of a layout, so that it keeps as much as it can of what it holds.

The places of a generation layout may be given to the ranks of its mesh in any order. With sizes that divide one
another the best order is that of HybridFlow's generation groups (arXiv 2409.19256, section 5.3: ranks at stride t / t_g
generate together), and the bytes per device then are (tp - t_g p_g) / (t_g p_g t p) of the model, the least possible.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plait.layout.boxes import Box, block_boxes
from plait.layout.holdings import Holdings
from plait.layout.mesh import Cluster, Layout, Mesh
from plait.layout.params import Parameters
from plait.layout.shards import shard


def regrouped(layout: Layout, parameters: Parameters, source: Holdings, cluster: Cluster) -> Layout:
    """The same layout with its ranks reordered to keep the most elements of `source` in place.

    No rank takes a place that the given order puts on another node: a tensor-parallel group that lies in one node stays
    in one. Among orders that keep as much, ranks of one (tp, pp) place are ascending over dp.
    """
    ranks, sizes = layout.mesh.ranks, layout.parallelism
    kept = _kept(layout, parameters, source)
    place_of = [(layout.coordinates(rank).tp, layout.coordinates(rank).pp) for rank in ranks]
    gain = np.array([[kept[rank][place] for place in place_of] for rank in ranks], dtype=np.float64)
    nodes = np.array([cluster.node_of(rank) for rank in ranks])
    column_of = [0] * len(ranks)
    for node in set(nodes.tolist()):
        here = np.flatnonzero(nodes == node).tolist()
        for row, column in zip(here, assign(gain[np.ix_(here, here)]), strict=True):
            column_of[row] = here[column]
    taken: dict[tuple[int, tuple[int, int]], list[int]] = {}
    """Node and (tp, pp), whose places can be exchanged for nothing → the ranks that take them."""
    for rank, column in zip(ranks, column_of, strict=True):
        taken.setdefault((cluster.node_of(ranks[column]), place_of[column]), []).append(rank)
    order = []
    for rank, place in zip(ranks, place_of, strict=True):
        pool = taken[cluster.node_of(rank), place]
        pool.sort()
        order.append(pool.pop(0))
    return Layout(Mesh(tuple(order)), sizes)


def _kept(layout: Layout, parameters: Parameters, source: Holdings) -> dict[int, dict[tuple[int, int], int]]:
    """rank → (tp, pp) → elements of that shard that the rank holds."""
    index = {param.name: number for number, param in enumerate(parameters.params)}
    boxes_of_ranks: dict[int, dict[int, list[Box]]] = {rank: {} for rank in layout.mesh.ranks}
    for rank in layout.mesh.ranks:
        for holding in source.ranks.get(rank, ()):
            boxes_of_ranks[rank].setdefault(holding.param, []).append(holding.box)
    counts: dict[int, dict[tuple[int, int], int]] = {rank: {} for rank in layout.mesh.ranks}
    for pp in range(layout.parallelism.pp):
        for tp in range(layout.parallelism.tp):
            boxes_of_shard = [
                (index[block.param.name], box)
                for block in shard(parameters, layout.parallelism, tp, pp).blocks
                for box in block_boxes(block)
            ]
            for rank, own_boxes in boxes_of_ranks.items():
                counts[rank][tp, pp] = sum(
                    _overlap(box, other) for number, box in boxes_of_shard for other in own_boxes.get(number, ())
                )
    return counts


def _overlap(box: Box, other: Box) -> int:
    number = 1
    for low in (0, 2, 4):
        number *= max(0, min(box[low + 1], other[low + 1]) - max(box[low], other[low]))
    return number


def assign(gain: NDArray[np.float64]) -> list[int]:
    """The column of each row, all distinct, with the greatest sum of gains.

    gain: [n, n]. Source: the Hungarian method by shortest augmenting paths (Jonker and Volgenant 1987); n^2 vector
    operations.
    """
    size = gain.shape[0]
    cost = gain.max() - gain
    row_price, column_price = np.zeros(size), np.zeros(size)
    row_of: list[int] = [-1] * size
    for row in range(size):
        distance = np.full(size, np.inf)
        before = np.full(size, -1)
        done = np.zeros(size, dtype=bool)
        current, column, total = row, -1, 0.0
        while current >= 0:
            reduced = cost[current] - row_price[current] - column_price + total
            closer = ~done & (reduced < distance)
            distance[closer], before[closer] = reduced[closer], column
            column = int(np.where(done, np.inf, distance).argmin())
            total = float(distance[column])
            done[column] = True
            current = row_of[column]
        row_price[row] += total
        _reprice(row_of, row_price, column_price, total - distance, done)
        while column >= 0:
            previous = int(before[column])
            row_of[column] = row if previous < 0 else row_of[previous]
            column = previous
    column_of = [0] * size
    for column, row in enumerate(row_of):
        column_of[row] = column
    return column_of


def _reprice(
    row_of: Sequence[int],
    row_price: NDArray[np.float64],
    column_price: NDArray[np.float64],
    change: NDArray[np.float64],
    done: NDArray[np.bool_],
) -> None:
    """Keep every reduced cost at 0 or more, and those of matched pairs at 0."""
    for column in np.flatnonzero(done).tolist():
        column_price[column] -= change[column]
        if row_of[column] >= 0:
            row_price[row_of[column]] += change[column]
