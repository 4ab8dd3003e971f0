"""Seconds and bytes of weights that go from one layout to another: the planner's own messages, played over the links.

Layers that go the same way are planned as one: between two cuts into stages they differ in nothing but their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from plait.cost.cluster import ClusterSpec
from plait.cost.costs import MoveCost
from plait.layout.holdings import weights
from plait.layout.mesh import Layout, Mesh, Parallelism
from plait.layout.move import BUCKET_BYTES, traffic_of
from plait.layout.move_cost import Bandwidths, cost
from plait.layout.params import Param, Parameters
from plait.layout.shards import stage_bounds

MOST_MESSAGES = 32
"""Into which the model's bytes are cut where buckets would be more: what each link carries is nearly the same."""


def move_cost(parameters: Parameters, source: Layout, target: Layout, dtype: str, cluster: ClusterSpec) -> MoveCost:
    """The move of a model that is held in `source`, and needed in `target` as well: what the busiest link carries, with
    its messages' latencies, and the copies of the rank with most of them. Whoever sends, receives all the while. Where
    the software says so, packing of the rank that sends and receives most, and what any move takes beside.
    """
    if source == target or not parameters.params:  # an adapter of a model without a layer that gets one
        return MoveCost(0.0, {}, 0)
    layers, origin, goal = stacked(parameters, source, target)
    held, needed = weights(layers, origin, dtype, "source"), weights(layers, goal, dtype, "target")
    bucket = max(BUCKET_BYTES, layers.num_elements * held.item_bytes // MOST_MESSAGES)
    carried = traffic_of(held, needed, cluster.mesh_cluster, bucket_bytes=bucket)
    times = cost(carried, bandwidths(cluster))
    terms = {"links": times.bound, "copies": times.copies}
    software = cluster.software
    if software.switch_s:
        terms["switching"] = software.switch_s
    if software.pack_bandwidth:
        ranks = {rank for link in carried.link_bytes for rank in link}
        packed = max((carried.sent_bytes(rank) + carried.received_bytes(rank) for rank in ranks), default=0)
        terms["packing"] = packed / software.pack_bandwidth
    return MoveCost(sum(terms.values()), terms, carried.total_bytes)


def offload_cost(cluster: ClusterSpec, layout: Layout, stage_bytes: Sequence[int]) -> MoveCost:
    """To host memory, of every rank at the same time; the slowest of them.

    Args:
        stage_bytes: of a rank of each pipeline stage.
    """
    stages = cluster.stages_of(layout) or (cluster.among(layout.mesh.ranks),) * len(stage_bytes)
    share = cluster.software.links
    seconds = [
        stage.host.latency_s + num_bytes / (stage.host.bandwidth * share)
        for stage, num_bytes in zip(stages, stage_bytes, strict=True)
    ]
    terms = {"copies": max(seconds)}
    sizes = layout.parallelism
    return MoveCost(max(seconds), terms, sum(stage_bytes) * sizes.dp * sizes.tp)


def bandwidths(cluster: ClusterSpec) -> Bandwidths:
    """What moves get of a cluster's links. A local copy reads and writes."""
    share = cluster.software.links
    return Bandwidths(
        cluster.near.bandwidth * share,
        cluster.inter.bandwidth * share,
        cluster.device.memory_bandwidth * cluster.software.memory / 2,
        near_latency=cluster.near.latency_s,
        far_latency=cluster.inter.latency_s,
    )


def stacked(parameters: Parameters, source: Layout, target: Layout) -> tuple[Parameters, Layout, Layout]:
    """The same model in fewer parameters: layers that both layouts have in one stage are one, as thick as all of them,
    and the layouts over these."""
    mine, theirs = (stage_bounds(parameters.num_layers, layout.parallelism) for layout in (source, target))
    cuts = sorted({*mine, *theirs})
    kinds: dict[int, list[Param]] = {}
    params = [param for param in parameters.params if param.layer is None]
    for param in parameters.params:
        if param.layer is not None:
            kinds.setdefault(param.layer, []).append(param)
    for number, (first, stop) in enumerate(pairwise(cuts)):
        groups: dict[tuple[object, ...], list[Param]] = {}
        for layer in range(first, stop):
            for param in kinds.get(layer, ()):
                like = (param.shape, param.cut, param.sections, param.heads, param.widths)
                groups.setdefault(like, []).append(param)
        for same in groups.values():
            typical = same[0]
            cut = None if typical.cut is None else typical.cut + 1
            units = (sum(typical.widths),) if typical.widths else ()  # as many elements, in one section
            params.append(replace(typical, shape=(len(same), *typical.shape), cut=cut, widths=units, layer=number))
    return (
        Parameters(tuple(params), parameters.aliases),
        _over(source, _counts(mine, cuts)),
        _over(target, _counts(theirs, cuts)),
    )


def _counts(bounds: Sequence[int], cuts: Sequence[int]) -> tuple[int, ...]:
    """Stages in units of what lies between two cuts."""
    return tuple(cuts.index(stop) - cuts.index(start) for start, stop in pairwise(bounds))


def _over(layout: Layout, stages: tuple[int, ...]) -> Layout:
    sizes = layout.parallelism
    over = Parallelism(sizes.dp, sizes.tp, sizes.pp, stages if sizes.pp > 1 else ())
    return Layout(Mesh(layout.mesh.ranks), over, layout.shards_weights)
