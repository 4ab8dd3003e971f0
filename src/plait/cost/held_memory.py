"""Bytes of optimizer state on one rank of a training layout. Torch-free."""

from __future__ import annotations

from plait.layout.mesh import Layout
from plait.layout.params import Parameters
from plait.layout.shards import held_elements, zero_range
from plait.training.memory import parameter_bytes, room_bytes


def optimizer_bytes(
    parameters: Parameters, layout: Layout, rank: int, dtype: str, *, followed: bool, sharded: bool
) -> int:
    """Masters, moments and gradients: gradients are summed over the whole block, masters and moments are held for the
    range of the rank's place along dp.

    Args:
        followed: whether a reference follows the weights, by an average of the masters.
        sharded: gradients are held for the range, too, and beside them the runs that are being summed.
    """
    per = parameter_bytes(dtype, trained=True, followed=followed)
    sizes, at = layout.parallelism, layout.coordinates(rank)
    once = held_elements(parameters, sizes, at.tp, at.pp, once=True)
    start, stop = zero_range(once, at.dp, sizes.dp)
    elements = held_elements(parameters, sizes, at.tp, at.pp)
    is_divided = sharded and sizes.dp > 1
    summed = (stop - start if is_divided else elements) * per.gradients
    rooms = room_bytes(elements, dtype) if is_divided else 0
    return (stop - start) * (per.masters + per.moments + per.average) + summed + rooms


def state_bytes(elements: int, once: int, dp: int, dtype: str, *, followed: bool, sharded: bool) -> int:
    """As `optimizer_bytes`, of the dp rank with most.

    Args:
        elements: of the rank's weights; once: of those whose masters are there.
        dp: ranks that share the masters.
    """
    per = parameter_bytes(dtype, trained=True, followed=followed)
    ranges = (zero_range(once, index, dp) for index in (0, dp - 1))
    most = max(stop - start for start, stop in ranges)
    is_divided = sharded and dp > 1
    summed = (most if is_divided else elements) * per.gradients
    rooms = room_bytes(elements, dtype) if is_divided else 0
    return most * (per.masters + per.moments + per.average) + summed + rooms
