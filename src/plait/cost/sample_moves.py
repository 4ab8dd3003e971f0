"""What it takes to have samples go on in other instances: to send their keys and values, or to compute these again."""

from __future__ import annotations

from plait.cost.cluster import ClusterSpec
from plait.cost.generation_memory import kv_bytes_per_token
from plait.cost.model_work import ModelWork
from plait.layout.mesh import Layout
from plait.models.shape import ModelShape
from plait.policy.migration import MoveTimes


def sample_move_times(shape: ModelShape, dtype: str, instance: Layout, cluster: ClusterSpec) -> MoveTimes:
    """Between two instances of a model like this one.

    Every device of an instance sends its part of the keys and values, over links of its own within a node, over one
    that it shares where there are several nodes. A prefill is as fast as the instance's matrix products.
    """
    ranks, cluster = len(instance.mesh.ranks), cluster.among(instance.mesh.ranks)
    link, lanes = (cluster.near, ranks) if cluster.nodes == 1 else (cluster.inter, 1)
    flops = shape.layers * ModelWork(shape, dtype, shape.vocabulary).products(1)
    speed = cluster.device.flops_of(dtype) * cluster.software.products * ranks
    return MoveTimes(
        link.latency_s,
        link.bandwidth * cluster.software.links * lanes,
        kv_bytes_per_token(shape, dtype),
        flops / speed,
    )
