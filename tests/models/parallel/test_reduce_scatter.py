"""Sums and new weights that are exchanged piece by piece take the memory of one piece, whatever their number."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from plait.layout.decoder import decoder_parameters
from plait.layout.mesh import Parallelism
from plait.layout.shards import shard
from plait.models.flat_weights import FlatWeights
from plait.models.parallel import nccl, reduce_scatter

PIECE = 8


@dataclass
class Alone:
    """In place of `Peers`: of two ranks the other has nothing.

    sums: address and numbers of what was summed at a time
    """

    size: int = 2
    ranks: tuple[int, ...] = (0, 1)
    index: int = 0
    group: Any = None
    sums: list[tuple[int, Tensor]] = field(default_factory=list)
    gathered: list[weakref.ref[Tensor]] = field(default_factory=list)

    def of_group(self, index: int) -> int:
        return index

    def sum_of_parts(self, parts: Tensor, own: Tensor) -> Tensor:
        self.sums.append((parts.untyped_storage().data_ptr(), parts.view(2, -1).clone()))
        return own

    def all_gather_into(self, parts: list[Tensor]) -> None:
        self.gathered = list(map(weakref.ref, parts))


@pytest.mark.parametrize("bounds", [(0, 20, 37), (0, 5, 40), (3, 40, 40)], ids=str)
def test_a_sum_that_is_filled_up_has_one_room(bounds: tuple[int, ...]) -> None:
    """Of each part a piece, and zeros behind it, though that of the piece before was longer."""
    flat, peers = torch.arange(1.0, 41.0), Alone()
    before = flat.clone()
    with (
        patch.object(reduce_scatter, "PIECE_ELEMENTS", PIECE),
        patch.object(nccl, "carries", lambda group, device: True),
    ):
        reduce_scatter.reduce_scatter(peers, flat, bounds)  # pyright: ignore[reportArgumentType]
    assert len(peers.sums) > 2
    assert len({address for address, _ in peers.sums}) == 1
    for at, (_, rows) in zip(range(0, 40, PIECE), peers.sums, strict=False):
        for row, (start, stop) in zip(rows, pairwise(bounds), strict=True):
            there = before[min(start + at, stop) : min(start + at + PIECE, stop)].tolist()
            assert row.tolist() == there + [0.0] * (len(row) - len(there))
    assert torch.equal(flat, before), "the other rank's parts are nothing here"


@pytest.mark.parametrize(("size", "elements"), [(2, PIECE), (8, PIECE), (64, PIECE // 8)])
def test_more_ranks_take_no_more_memory_than_eight(size: int, elements: int) -> None:
    with patch.object(reduce_scatter, "PIECE_ELEMENTS", PIECE):
        assert reduce_scatter.piece_elements(size) == elements


def test_new_weights_that_lie_in_several_places_have_the_rooms_of_one_piece() -> None:
    parameters = decoder_parameters(
        layers=1, hidden=4, intermediate=8, heads=2, kv_heads=1, head_dim=2, vocabulary=9, tied=True
    )
    layout = shard(parameters, Parallelism(), 0, 0)
    weights, peers = FlatWeights(layout, None, [torch.zeros(block.shape) for block in layout.blocks]), Alone()
    end, empty = layout.num_elements, torch.empty

    def room(*args: Any, **options: Any) -> Tensor:
        assert not any(part() is not None for part in peers.gathered), "rooms of the piece before are there still"
        return empty(*args, **options)

    with patch.object(reduce_scatter, "PIECE_ELEMENTS", PIECE), patch.object(torch, "empty", room):
        weights.all_gather(peers, (0, end // 3, end))  # pyright: ignore[reportArgumentType]
    assert len(peers.gathered) == 2
