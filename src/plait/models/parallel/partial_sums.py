"""Gradients that are sums over ranks of tensor parallelism, of which each rank has a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.layout.params import Param
from plait.models.parallel.peers import Peers


@dataclass(frozen=True)
class Partials:
    """Parameters whose gradient on this rank is a part of the sum over some ranks, which hold equal values."""

    names: tuple[str, ...]
    members: tuple[int, ...]
    """Indices along tp, this rank's among them; in order."""


def sharers(param: Param, index: int, ways: int) -> tuple[int, ...]:
    """The ranks along tp that hold the same block as rank `index`, in order."""
    own = param.tp_range(index, ways)
    return tuple(other for other in range(ways) if param.tp_range(other, ways) == own)


def sum_partials(partials: Sequence[Partials], parts: Mapping[str, Tensor], tp: Peers) -> None:
    """Replace the gradients of partial sums by the sums, in place.

    Args:
        parts: name → gradient [elements], a contiguous view of a buffer.
    """
    for partial in partials:
        own = [parts[name] for name in partial.names]
        bucket = torch.cat([part.reshape(-1) for part in own])
        if len(partial.members) == tp.size:
            tp.all_reduce(bucket)
        else:
            bucket = _sum_among(bucket, partial.members, tp)
        for part, total in zip(own, bucket.split([part.numel() for part in own]), strict=True):
            part.copy_(total.view_as(part))


def _sum_among(own: Tensor, members: tuple[int, ...], tp: Peers) -> Tensor:
    """The sum over some of the ranks, in their order."""
    others, nothing = set(members) - {tp.index}, own.new_empty(0)
    received = [torch.empty_like(own) if peer in others else nothing for peer in range(tp.size)]
    tp.exchange([own if peer in others else nothing for peer in range(tp.size)], received, "partial gradients")
    total = torch.zeros_like(own)
    for peer in members:
        total += own if peer == tp.index else received[peer]
    return total
