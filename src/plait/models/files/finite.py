"""Whether weights are numbers: those that are not finite are neither saved as good nor exported."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

_NAMED = 3


class Broken(NamedTuple):
    """A tensor with elements that are NaN or infinite."""

    name: str
    count: int
    """How many such elements."""
    total: int
    """How many elements it has."""


def is_finite(tensor: Tensor) -> bool:
    """Whether every element is, of a tensor of any shape and dtype; takes no memory, other than `isfinite`."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    least, most = torch.aminmax(tensor.detach())  # NaN, if there is one
    return bool(torch.isfinite(least) & torch.isfinite(most))


def broken(tensors: Iterable[tuple[str, Tensor]]) -> list[Broken]:
    """Those, of any shapes and dtypes, with elements that are not finite, in their order."""
    return [
        Broken(name, tensor.numel() - int(torch.isfinite(tensor.detach()).sum()), tensor.numel())
        for name, tensor in tensors
        if not is_finite(tensor)
    ]


def describe(pieces: list[Broken]) -> str:
    """`2 tensors are not finite: model.norm.weight (3 of 64 elements), …`. A tensor may come in several pieces."""
    whole: dict[str, Broken] = {}
    for name, count, total in pieces:
        before = whole.get(name, Broken(name, 0, 0))
        whole[name] = Broken(name, before.count + count, before.total + total)
    tensors = list(whole.values())
    first = ", ".join(f"{tensor.name} ({tensor.count} of {tensor.total} elements)" for tensor in tensors[:_NAMED])
    more = f" and {len(tensors) - _NAMED} more" if len(tensors) > _NAMED else ""
    verb = "tensors are" if len(tensors) > 1 else "tensor is"
    return f"{len(tensors)} {verb} not finite: {first}{more}"
