"""Random models and layouts for property tests."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from plait.layout.decoder import decoder_parameters
from plait.layout.mesh import Cluster, Layout, Mesh, Parallelism
from plait.layout.params import Param, Parameters


@st.composite
def models(draw: st.DrawFn, min_heads: int = 1) -> Parameters:
    """Decoders with odd sizes: grouped heads, tied or not, experts or not, a vocabulary that divides by nothing; the
    first layer may have a linear attention."""
    groups = draw(st.integers(1, 5))
    per_group = draw(st.integers(-(-min_heads // groups), max(3, -(-min_heads // groups))))
    decoder = decoder_parameters(
        layers=draw(st.integers(1, 5)),
        hidden=draw(st.integers(1, 7)),
        intermediate=draw(st.integers(max(1, min_heads), min_heads + 9)),
        heads=groups * per_group,
        kv_heads=groups,
        head_dim=draw(st.integers(1, 3)),
        vocabulary=draw(st.integers(max(1, min_heads), min_heads + 23)),
        tied=draw(st.booleans()),
        experts=draw(st.sampled_from((0, 0, max(3, min_heads)))),
        cut_vocabulary=draw(st.booleans()),
    )
    units, width, hidden = max(1, min_heads) + draw(st.integers(0, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 7))
    joined, rows = (2, 2, width), units * (4 + width)
    mixer = (
        Param("model.layers.0.linear_attn.in_proj_qkv.weight", (rows, hidden), 0, 0, widths=joined),
        Param("model.layers.0.linear_attn.conv1d.weight", (rows, 1, 4), 0, 0, widths=joined),
        Param("model.layers.0.linear_attn.A_log", (units,), 0, 0, widths=(1,)),
        Param("model.layers.0.linear_attn.out_proj.weight", (hidden, units * width), 0, 1, widths=(width,)),
    )
    return Parameters(mixer + decoder.params, decoder.aliases) if draw(st.booleans()) else decoder


def ways(param: Param) -> int:
    return param.heads.heads if param.heads else param.extent


@st.composite
def layouts(draw: st.DrawFn, parameters: Parameters, cluster: Cluster) -> Layout:
    """Any legal (dp, tp, pp) on any ranks in any order, with any stages."""
    size = draw(st.integers(1, cluster.num_devices))
    limit = min(ways(param) for param in parameters.params if param.cut is not None)
    sizes = [
        parallelism
        for parallelism in Parallelism.all_of(size)
        if parallelism.tp <= limit and parallelism.pp <= parameters.num_layers
    ]
    chosen = draw(st.sampled_from(sizes))
    if chosen.pp > 1 and draw(st.booleans()):
        inner = draw(st.sets(st.integers(1, parameters.num_layers - 1), min_size=chosen.pp - 1, max_size=chosen.pp - 1))
        bounds = [0, *sorted(inner), parameters.num_layers]
        stages = tuple(stop - start for start, stop in pairwise(bounds))
        chosen = Parallelism(chosen.dp, chosen.tp, chosen.pp, stages)
    if draw(st.booleans()):
        first = draw(st.integers(0, cluster.num_devices - size))
        return Layout(Mesh(tuple(range(first, first + size))), chosen)
    ranks = draw(st.permutations(range(cluster.num_devices)))[:size]
    return Layout(Mesh(tuple(ranks)), chosen)


CLUSTERS = [(1, 1), (1, 4), (2, 2), (2, 4), (4, 2), (3, 5), (4, 4), (1, 16), (2, 8)]
clusters = st.sampled_from([Cluster(nodes, devices) for nodes, devices in CLUSTERS])


@st.composite
def pairs(draw: st.DrawFn, on: st.SearchStrategy[Cluster] = clusters) -> tuple[Parameters, Cluster, Layout, Layout]:
    cluster = draw(on)
    parameters = draw(models(draw(st.integers(1, min(8, cluster.num_devices)))))
    return parameters, cluster, draw(layouts(parameters, cluster)), draw(layouts(parameters, cluster))
