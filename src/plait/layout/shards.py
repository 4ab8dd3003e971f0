"""Which block of which parameter each rank of a layout holds.

Pipeline stages hold layers, tensor parallelism cuts each parameter along its own dim, dp repeats. The optimizer's
state is the same parameters, further cut over dp as one flat range (ZeRO-1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise

from plait.errors import LayoutError
from plait.layout.mesh import Cluster, Layout, Parallelism
from plait.layout.params import ALIGNMENT_ELEMENTS, Block, FlatLayout, Param, Parameters, aligned


def check(parameters: Parameters, layout: Layout, cluster: Cluster | None = None) -> None:
    """Refuse a layout that the model or the devices do not allow.

    Raises:
        LayoutError: names the key to change (ranks, tp, pp or stages) and what would be accepted.
    """
    sizes = layout.parallelism
    if cluster is not None and (highest := max(layout.mesh.ranks)) >= cluster.num_devices:
        raise LayoutError(f"ranks: expected ranks below {cluster.num_devices}, the devices there are, found {highest}")
    if sizes.pp > max(1, parameters.num_layers):
        raise LayoutError(f"pp: expected at most {parameters.num_layers}, the layers of the model, found {sizes.pp}")
    if sizes.stages and sum(sizes.stages) != parameters.num_layers:
        raise LayoutError(
            f"stages: expected {parameters.num_layers} layers in all, found {' + '.join(map(str, sizes.stages))} "
            f"= {sum(sizes.stages)}"
        )
    if sizes.tp == 1:
        return
    if all(param.cut is None for param in parameters.params):
        raise LayoutError(f"tp: expected 1, because the model has no plan for tensor parallelism, found {sizes.tp}")
    limit, param = _narrowest(parameters)
    if sizes.tp > limit:
        what = "query heads" if param.heads else f"elements of dim {param.cut} of {param.name}"
        what = "experts of a layer, which stay whole" if param.cut == 0 and ".experts." in param.name else what
        what = "key heads or groups of its recurrent layers" if param.widths else what
        raise LayoutError(f"tp: expected at most {limit}, the {what}, found {sizes.tp}")


def check_instances(parameters: Parameters, instances: Sequence[Layout], cluster: Cluster | None = None) -> None:
    """Refuse instances that the model or the devices do not allow, or that share a device. They may differ in size.

    Raises:
        LayoutError: as `check`; names `ranks` where two instances share one.
    """
    taken: dict[int, int] = {}
    for number, instance in enumerate(instances):
        check(parameters, instance, cluster)
        if instance.parallelism.dp != 1:
            raise LayoutError(f"dp: expected 1 for instance {number}, a single copy, found {instance.parallelism.dp}")
        for rank in instance.mesh.ranks:
            if rank in taken:
                raise LayoutError(
                    f"ranks: expected instances on devices of their own, found {rank} in instances "
                    f"{taken[rank]} and {number}"
                )
            taken[rank] = number


def most_tp(parameters: Parameters) -> int:
    """Ways in which a model can be sharded by tensor parallelism."""
    return 1 if all(param.cut is None for param in parameters.params) else _narrowest(parameters)[0]


def _narrowest(parameters: Parameters) -> tuple[int, Param]:
    """How many ways the least divisible parameter can be cut, and that parameter."""
    ways = lambda param: param.heads.heads if param.heads else param.extent
    param = min((param for param in parameters.params if param.cut is not None), key=ways)
    return ways(param), param


def layer_sizes(parameters: Parameters) -> tuple[float, ...]:
    """Elements of each layer, as multiples of the average one's."""
    elements = [0] * parameters.num_layers
    for param in parameters.params:
        if param.layer is not None:
            elements[param.layer] += param.num_elements
    return tuple(count * len(elements) / sum(elements) for count in elements)


def stage_bounds(num_layers: int, parallelism: Parallelism) -> tuple[int, ...]:
    """First layer of each stage, and the number of layers behind the last."""
    if parallelism.stages:
        bounds = [0]
        for layers in parallelism.stages:
            bounds.append(bounds[-1] + layers)
        return tuple(bounds)
    return tuple(stage * num_layers // parallelism.pp for stage in range(parallelism.pp + 1))


def balanced_stages(num_layers: int, num_stages: int, head: float) -> tuple[int, ...]:
    """Layers of each pipeline stage, so that the stage with the most work has as little of it as can be.

    The last stage has the head besides. With k layers there, the others have at most
    m(k) = ceil((num_layers - k) / (num_stages - 1)), and k makes max(m(k), k + head) least; where several do, it is the
    largest of them. What does not divide among the others goes to the later ones: the earlier a stage, the more
    micro-batches wait in it for their backward.

    Args:
        num_stages: at most `num_layers`.
        head: what the head is worth, in layers, 0 or more.
    """
    assert 1 <= num_stages <= num_layers, f"expected 1 to {num_layers} stages, found {num_stages}"
    if num_stages == 1:
        return (num_layers,)
    others = num_stages - 1
    most = lambda last: max(-(-(num_layers - last) // others), last + head)
    last = min(range(num_layers - others, 0, -1), key=most)
    bounds = [stage * (num_layers - last) // others for stage in range(num_stages)]
    return (*(stop - start for start, stop in pairwise(bounds)), last)


def stages_of(param: Param, bounds: tuple[int, ...]) -> tuple[int, ...]:
    """The stages that hold a parameter: one, or two for a tied embedding. `bounds` as of `stage_bounds`."""
    last = len(bounds) - 2
    if param.layer is not None:
        return (next(stage for stage in range(last + 1) if param.layer < bounds[stage + 1]),)
    match param.ends:
        case "first":
            return (0,)
        case "last":
            return (last,)
        case "both":
            return (0, last) if last else (0,)


def has_two_holders(param: Param) -> bool:
    """Whether the first and the last of several stages both hold a parameter: a tied embedding."""
    return param.layer is None and param.ends == "both"


def shard(parameters: Parameters, parallelism: Parallelism, tp: int, pp: int, *, once: bool = False) -> FlatLayout:
    """The flat buffer of working weights of the ranks with these coordinates (equal for every dp).

    once: leave out a tied parameter on all but the first stage that holds it (masters and moments exist once).
    """
    of_one_copy = parallelism if parallelism.dp == 1 else replace(parallelism, dp=1)
    return _shard(Same(parameters), of_one_copy, tp, pp, once)


class Same:
    """Compares by identity: hashing every parameter of a model at each lookup would cost more than the answer."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters

    def __hash__(self) -> int:
        return id(self.parameters)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.parameters is self.parameters


@lru_cache(maxsize=1024)
def _shard(same: Same, parallelism: Parallelism, tp: int, pp: int, once: bool) -> FlatLayout:
    parameters = same.parameters
    held = _held_by_stage(same, stage_bounds(parameters.num_layers, parallelism))[pp]
    blocks = [Block(param, *param.tp_range(tp, parallelism.tp)) for param, first in held if first == pp or not once]
    names = {block.param.name for block in blocks}
    return FlatLayout(tuple(blocks), {alias: name for alias, name in parameters.aliases.items() if name in names})


@lru_cache(maxsize=256)
def _held_by_stage(same: Same, bounds: tuple[int, ...]) -> tuple[tuple[tuple[Param, int], ...], ...]:
    """The parameters of each stage, each with the first stage that holds it."""
    held: list[list[tuple[Param, int]]] = [[] for _ in bounds[1:]]
    for param in same.parameters.params:
        stages = stages_of(param, bounds)
        for stage in stages:
            held[stage].append((param, stages[0]))
    return tuple(map(tuple, held))


def held_elements(parameters: Parameters, parallelism: Parallelism, tp: int, pp: int, *, once: bool = False) -> int:
    """`shard(…).num_elements`, summed up without making its blocks: searches ask for thousands of layouts."""
    return stage_elements(parameters, parallelism, tp)[pp][once]


def elements_by_stage(parameters: Parameters, parallelism: Parallelism) -> tuple[set[tuple[int, int]], ...]:
    """What the devices of each stage hold: the distinct pairs (elements, those of them that are trained there)."""
    of_ways = [stage_elements(parameters, parallelism, tp) for tp in range(parallelism.tp)]
    return tuple(set(stage) for stage in zip(*of_ways, strict=True))


def stage_elements(parameters: Parameters, parallelism: Parallelism, tp: int) -> list[tuple[int, int]]:
    """For tp rank `tp`, by pipeline stage: (elements that it holds, those of them that it trains)."""
    by_layer, first, last, both = _elements(Same(parameters), parallelism.tp, tp)
    bounds = stage_bounds(parameters.num_layers, parallelism)
    end = len(bounds) - 2
    of_stages = []
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        is_first, is_last = stage == 0, stage == end
        alone = by_layer[stop] - by_layer[start] + first * is_first + last * is_last
        of_stages.append((alone + both * (is_first or is_last), alone + both * is_first))
    return of_stages


def largest_in_layers(layout: FlatLayout) -> int:
    """Elements of the largest block of a layer; 0: there are no layers."""
    return max((block.num_elements for block in layout.blocks if block.param.layer is not None), default=0)


def stage_largest(parameters: Parameters, parallelism: Parallelism, tp: int) -> tuple[int, ...]:
    """By stage, of one of tp: `largest_in_layers`, without making its blocks."""
    by_layer = _largest(Same(parameters), parallelism.tp, tp)
    bounds = stage_bounds(parameters.num_layers, parallelism)
    return tuple(max(by_layer[start:stop], default=0) for start, stop in pairwise(bounds))


@lru_cache(maxsize=1024)
def _largest(same: Same, ways: int, index: int) -> tuple[int, ...]:
    """Elements of the largest block of each layer of one of `ways` parts."""
    layers = [0] * same.parameters.num_layers
    for param in same.parameters.params:
        if param.layer is not None:
            block = Block(param, *param.tp_range(index, ways))
            layers[param.layer] = max(layers[param.layer], block.num_elements)
    return tuple(layers)


GATHERED_LAYERS = 2
"""Layers that a rank has room for where it gathers weights that dp shares: one computes, another is on its way."""


def gathered_elements(parameters: Parameters, parallelism: Parallelism, tp: int) -> tuple[int, ...]:
    """By stage, of one of tp: elements of the rooms that weights are gathered to, what belongs to no layer and the
    largest layer, of these `GATHERED_LAYERS`."""
    by_layer, first, last, both = _elements(Same(parameters), parallelism.tp, tp)
    bounds = stage_bounds(parameters.num_layers, parallelism)
    end, of_stages = len(bounds) - 2, []
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        is_first, is_last = stage == 0, stage == end
        ends = first * is_first + last * is_last + both * (is_first or is_last)
        largest = max((by_layer[at + 1] - by_layer[at] for at in range(start, stop)), default=0)
        of_stages.append(ends + GATHERED_LAYERS * largest)
    return tuple(of_stages)


@lru_cache(maxsize=1024)
def _elements(same: Same, ways: int, index: int) -> tuple[tuple[int, ...], int, int, int]:
    """Elements of one of `ways` parts, gaps included: of all layers before each, and what is on the first stage, on the
    last, on both."""
    layers = [0] * same.parameters.num_layers
    ends = {"first": 0, "last": 0, "both": 0}
    for param in same.parameters.params:
        count = aligned(Block(param, *param.tp_range(index, ways)).num_elements)
        if param.layer is None:
            ends[param.ends] += count
        else:
            layers[param.layer] += count
    return (0, *accumulate(layers)), ends["first"], ends["last"], ends["both"]


def zero_range(num_elements: int, index: int, ways: int) -> tuple[int, int]:
    """Elements [start, stop) of a flat buffer that dp rank `index` of `ways` updates; cuts keep the alignment."""
    lines = num_elements // ALIGNMENT_ELEMENTS
    return index * lines // ways * ALIGNMENT_ELEMENTS, (index + 1) * lines // ways * ALIGNMENT_ELEMENTS
