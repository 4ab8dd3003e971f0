"""What is gathered together of weights that ranks of dp share, and where it is gathered to (`gathered_layers`)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn

from plait.errors import ModelError
from plait.layout.params import aligned
from plait.models.parallel.transfer import Transfer
from plait.models.weight_share import WeightShare

_LAYER = re.compile(r"^.*?\.\d+(?=\.)")
"""The name of a layer's module, in that of a parameter."""


class Gathered(NamedTuple):
    """A parameter, and where it lies in a room."""

    param: nn.Parameter
    placeholder: Tensor
    """Stands for the parameter while it is not gathered; has its shape."""
    at: int


@dataclass(frozen=True, eq=False)
class Unit:
    """What is gathered together: a layer, or what belongs to none."""

    ranges: tuple[tuple[int, int, int], ...]
    """(start, stop) in the flat layout, and the place in a room."""
    params: tuple[Gathered, ...]
    num_elements: int


@dataclass(eq=False)
class Room:
    """A buffer that one unit after another is gathered into."""

    memory: Tensor
    """[elements]."""
    unit: Unit | None = None
    """The unit whose weights are in it or on their way; None: it is free."""
    arriving: list[Transfer] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until all of the unit's weights have arrived."""
        for transfer in self.arriving:
            transfer.wait()
        self.arriving.clear()


def unit_of(share: WeightShare, layer: int | None, module: nn.Module) -> Unit:
    """A layer, or with None what belongs to none, with the parameters of a module."""
    ranges: list[tuple[int, int, int]] = []
    params, end = [], 0
    for (block, start, _), placeholder in zip(share.layout.entries, share.placeholders, strict=True):
        if block.param.layer == layer:
            length = aligned(block.num_elements)
            params.append(Gathered(module.get_parameter(block.param.name), placeholder, end))
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], start + length, ranges[-1][2])
            else:
                ranges.append((start, start + length, end))
            end += length
    return Unit(tuple(ranges), tuple(params), end)


def modules_of(share: WeightShare) -> dict[int, str]:
    """Number of a layer → the name of its module.

    Raises:
        ModelError: the parameters of a layer are in several.
    """
    found: dict[int, str] = {}
    for block in share.layout.blocks:
        layer, match = block.param.layer, _LAYER.match(block.param.name)
        if layer is not None and match is not None and found.setdefault(layer, match[0]) != match[0]:
            raise ModelError(
                f"optimizer.shard_weights: expected the weights of layer {layer} in one module, found them in "
                f"{found[layer]} and {match[0]}; set it to false, or take a model of another family"
            )
    return found


def check_aliases(share: WeightShare) -> None:
    """Raises ModelError where layers share weights, which are gathered for one of them alone."""
    for alias, name in share.layout.aliases.items():
        if _LAYER.match(alias) is not None:
            raise ModelError(
                f"optimizer.shard_weights: {alias} is {name}, and layers that share weights are not gathered one by "
                "one; set it to false, or take a model of another family"
            )
