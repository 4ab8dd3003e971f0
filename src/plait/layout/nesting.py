"""Several parts of a model in one memory: a block that lies inside a block of another part is a view of it.

A rank that trains with a block and generates with a larger one that contains it keeps the larger one only. Blocks cut
along their first dim nest as contiguous ranges, all others as strided views; neither is ever copied between the two.
Source: the 3D-HybridEngine of HybridFlow (arXiv 2409.19256, section 5), without its condition on parallelism sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from plait.layout.boxes import Holding, dense_strides
from plait.layout.params import Param, aligned

LEAST_SHARE = 0.1
"""The least share of a part that has to lie in the memory of others: below, it stays one buffer. Norms alone are not
worth it.
"""

Held = tuple[Holding, ...]


@dataclass(frozen=True)
class AliasedPart:
    """Where one part of a model lies on a rank.

    held:    its blocks, in the order of its flat layout, each as the boxes that it consists of (`boxes.block_boxes`)
    lengths: buffer → its elements, for each buffer that holds some of the part
    own:     elements of the part's own buffer: those that lie in no other part's buffer
    """

    held: Held
    lengths: Mapping[str, int]
    own: int


def nest(parts: Mapping[str, Held], params: Sequence[Param], whole: Collection[str] = ()) -> dict[str, AliasedPart]:
    """Where the parts of a model that a rank has lie in memory, so that they share what they have in common.

    If a block lies within another, only the larger one is stored, and the smaller is its guest. A part that hosts
    guests and is no guest itself is one buffer by its own layout, as it would be alone. Blocks that overlap without one
    lying within the other are both stored.

    Args:
        parts: name of its own buffer → the blocks of a flat layout, dense, in order.
        params: what `Holding.param` counts.
        whole: parts that are to be one buffer, whatever others hold.
    """
    alone = set(whole)
    while True:
        hosts = _hosts(parts, params, alone)
        few = {name for name in parts.keys() - alone if 0 < _guest_share(name, parts[name], hosts) < LEAST_SHARE}
        if not few:
            break
        alone |= few
    stored = {name: _stored(name, held, hosts) for name, held in parts.items()}
    return {name: _nest(name, held, stored, hosts) for name, held in parts.items()}


_Place = tuple[str, int]
"""A part, and a block's number in it."""


def _hosts(parts: Mapping[str, Held], params: Sequence[Param], alone: Collection[str]) -> dict[_Place, _Place]:
    """Block → the stored block that it is a view of."""
    sizes = {name: sum(holding.box.num_elements for holding in held) for name, held in parts.items()}
    by_param: dict[int, list[tuple[_Place, Holding]]] = {}
    for name, held in parts.items():
        for number, holding in enumerate(held):
            by_param.setdefault(holding.param, []).append(((name, number), holding))
    hosts: dict[_Place, _Place] = {}
    for number, blocks in by_param.items():
        # The largest first; of equal ones those that cannot be guests, then those of the largest part.
        blocks.sort(key=lambda block: (-block[1].box.num_elements, block[0][0] not in alone, -sizes[block[0][0]]))
        stored: list[tuple[_Place, Holding]] = []
        for place, holding in blocks:
            fitting = (at for at, other in stored if place[0] not in alone and _is_view(params[number], holding, other))
            if (host := next(fitting, None)) is not None:
                hosts[place] = host
            else:
                stored.append((place, holding))
    return hosts


def _is_view(param: Param, held: Holding, host: Holding) -> bool:
    """Whether the block is a strided tensor of the parameter's dims inside the other. A range of each of several
    sections is none, and kernels of stacked matrices (experts) want them dense."""
    if not host.box.holds(held.box) or (len(param.widths) > 1 and host.box != held.box):
        return False
    is_dense = held.box.shape[0] == 1 or held.box.shape == host.box.shape
    return is_dense or (param.sections == 1 and len(param.shape) <= 2)


def _guest_share(name: str, held: Held, hosts: Mapping[_Place, _Place]) -> float:
    guests = sum(holding.box.num_elements for number, holding in enumerate(held) if (name, number) in hosts)
    return guests / max(1, sum(holding.box.num_elements for holding in held))


def _stored(name: str, held: Held, hosts: Mapping[_Place, _Place]) -> tuple[dict[int, Holding], int]:
    """A part's own buffer: number of a block → its place, for the blocks that are no guests, and the buffer's length.
    Blocks of one parameter (ranges of several sections) lie close together, as all of them are guests or none is."""
    places: dict[int, Holding] = {}
    end = 0
    for number, holding in enumerate(held):
        if (name, number) not in hosts:
            if number == 0 or held[number - 1].param != holding.param:
                end = aligned(end)
            places[number] = holding._replace(buffer=name, offset=end, strides=dense_strides(holding.box))
            end += holding.box.num_elements
    return places, aligned(end)


def _nest(
    name: str, held: Held, stored: Mapping[str, tuple[dict[int, Holding], int]], hosts: Mapping[_Place, _Place]
) -> AliasedPart:
    nested_holdings = []
    for number, holding in enumerate(held):
        owner, index = hosts.get((name, number), (name, number))
        place = stored[owner][0][index]
        nested_holdings.append(holding._replace(buffer=owner, offset=place.first(holding.box), strides=place.strides))
    own = stored[name][1]
    # An own buffer of nothing is none; a part without any block keeps one, so that it lies somewhere.
    used = {holding.buffer for holding in nested_holdings} or {name}
    return AliasedPart(tuple(nested_holdings), {buffer: stored[buffer][1] for buffer in stored if buffer in used}, own)
