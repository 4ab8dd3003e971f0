"""Bytes of optimizer state on one rank of a training layout. Torch-free."""

from __future__ import annotations

from plait.layout.mesh import Coordinates, Layout, Parallelism
from plait.layout.params import Parameters
from plait.layout.shards import held_elements, shard, stage_largest, zero_range
from plait.layout.zero_shares import tied_pieces
from plait.training.memory import parameter_bytes, room_bytes


def optimizer_bytes(
    parameters: Parameters, layout: Layout, rank: int, dtype: str, *, followed: bool, sharded: bool
) -> int:
    """Masters, moments and gradients: gradients are summed over the whole block, masters and moments are held for the
    range of the rank's place along dp.

    Args:
        followed: whether a reference follows the weights, by an average of the masters.
        sharded: gradients are held for the range, too, and beside them the runs that are being summed; on the last
            stage those of a tied embedding also, for what the rank's place along dp updates of it on the first.
    """
    per = parameter_bytes(dtype, trained=True, followed=followed)
    sizes, at = layout.parallelism, layout.coordinates(rank)
    once = held_elements(parameters, sizes, at.tp, at.pp, once=True)
    start, stop = zero_range(once, at.dp, sizes.dp)
    elements = held_elements(parameters, sizes, at.tp, at.pp)
    is_divided = sharded and sizes.dp > 1
    kept = stop - start + _tied(parameters, sizes, at) if is_divided else elements
    summed = kept * per.gradients
    rooms = room_bytes(elements, stage_largest(parameters, sizes, at.tp)[at.pp], dtype) if is_divided else 0
    return (stop - start) * (per.masters + per.moments + per.average) + summed + rooms


def share_elements(parameters: Parameters, layout: Layout, rank: int) -> int:
    """Elements of weights that a rank holds of a layout whose ranks of dp share them: what it would update, and on the
    last stage its part of a tied embedding."""
    sizes, at = layout.parallelism, layout.coordinates(rank)
    start, stop = zero_range(held_elements(parameters, sizes, at.tp, at.pp, once=True), at.dp, sizes.dp)
    return stop - start + _tied(parameters, sizes, at)


def most_shared(held: tuple[int, int], dp: int, first: int) -> int:
    """As `share_elements`, of the dp rank with most. Arguments as of `state_bytes`."""
    elements, once = held
    return _longest(once, dp) + min(elements - once, _longest(first, dp))


def _tied(parameters: Parameters, sizes: Parallelism, at: Coordinates) -> int:
    """Elements of gradients that a rank of the last stage sums for the first."""
    if at.pp == 0:
        return 0
    pieces = tied_pieces(shard(parameters, sizes, at.tp, at.pp), parameters, sizes, at)
    return sum(stop - start for owner, start, stop in pieces if owner == at.dp)


def state_bytes(
    held: tuple[int, int],
    dp: int,
    dtype: str,
    *,
    followed: bool,
    sharded: bool,
    largest: int = 0,
    first: int = 0,
) -> int:
    """As `optimizer_bytes`, of the dp rank with most.

    Args:
        held: elements of the rank's weights; of those whose masters are there.
        dp: ranks that share the masters.
        largest: elements of the largest parameter of a layer.
        first: elements of the first stage, where this is the last one: of what both hold, each place along dp sums at
            most what it updates there.
    """
    per = parameter_bytes(dtype, trained=True, followed=followed)
    elements, once = held
    most = _longest(once, dp)
    is_divided = sharded and dp > 1
    tied = min(elements - once, _longest(first, dp))
    summed = (most + tied if is_divided else elements) * per.gradients
    rooms = room_bytes(elements, largest, dtype) if is_divided else 0
    return most * (per.masters + per.moments + per.average) + summed + rooms


def _longest(elements: int, dp: int) -> int:
    """Elements of the longest range that `zero_range` gives."""
    ranges = (zero_range(elements, index, dp) for index in (0, dp - 1))
    return max(stop - start for start, stop in ranges)
