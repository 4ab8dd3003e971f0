"""Bytes of optimizer state on one rank of a training layout. Torch-free."""

from __future__ import annotations

from plait.layout.mesh import Parallelism
from plait.layout.params import Parameters
from plait.layout.shards import shard, zero_range
from plait.training.memory import parameter_bytes


def optimizer_bytes(
    parameters: Parameters, sizes: Parallelism, tp: int, pp: int, dp: int, dtype: str, *, followed: bool
) -> int:
    """Masters, moments and gradients: gradients are summed over the whole block, masters and moments are held for the
    range of this dp rank.

    Args:
        tp, pp, dp: the rank's place.
        followed: whether a reference follows the weights, by an average of the masters.
    """
    per = parameter_bytes(dtype, trained=True, followed=followed)
    once = shard(parameters, sizes, tp, pp, once=True).num_elements
    start, stop = zero_range(once, dp, sizes.dp)
    gradients = shard(parameters, sizes, tp, pp).num_elements * per.gradients
    return (stop - start) * (per.masters + per.moments + per.average) + gradients
