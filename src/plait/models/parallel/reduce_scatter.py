"""The sum over ranks of a flat buffer, each rank its own part: parts may be of any length, some empty.

By messages, where the backend has no reduce-scatter of its own that is worth it: each rank gets the others' parts, and
adds them up in the order of the ranks, so a number does not depend on how parts are cut. By NCCL's own, on GPUs: in
place where parts are equal, else in pieces filled up with zeros. It adds in an order of its own, which follows from the
ranks, their links and the cut: numbers are those of the messages but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from plait.models.parallel import nccl
from plait.models.parallel.peers import Peers

PIECE_ELEMENTS, MOST_PIECES = 1 << 22, 8
"""Elements of each rank that are exchanged at a time, through memory of their own (here, and of weights); of more ranks
than so many, each has fewer, so that the memory stays the same."""


def piece_elements(size: int) -> int:
    """Elements that are exchanged at a time of each of so many ranks."""
    return PIECE_ELEMENTS * MOST_PIECES // max(MOST_PIECES, size)


def reduce_scatter(peers: Peers, flat: Tensor, bounds: Sequence[int]) -> Tensor:
    """Sum a flat buffer over the ranks, each rank its own part only: `bounds[i]` to `bounds[i + 1]` of rank i.

    Args:
        flat: [elements]; unchanged but for the part of this rank.

    Returns:
        The part of this rank, a view of `flat`.
    """
    own = flat[bounds[peers.index] : bounds[peers.index + 1]]
    sizes = [stop - start for start, stop in pairwise(bounds)]
    if peers.size == 1 or not max(sizes):
        return own
    if not nccl.carries(peers.group, flat.device):
        return _by_messages(peers, flat, bounds, own)
    if min(sizes) == max(sizes) and list(peers.ranks) == sorted(peers.ranks):
        return peers.sum_of_parts(flat[bounds[0] : bounds[-1]], own)
    return _filled_up(peers, flat, bounds, own)


def _by_messages(peers: Peers, flat: Tensor, bounds: Sequence[int], own: Tensor) -> Tensor:
    # One memory for all pieces: fresh pages cost more than the sums.
    room = flat.new_empty(peers.size, min(len(own), piece_elements(peers.size)))
    for pieces in _pieces(flat, bounds):
        mine = pieces[peers.index]
        received = [mine if peer == peers.index else room[peer, : len(mine)] for peer in range(peers.size)]
        peers.exchange(pieces, received, "reduce_scatter")
        _sum_into(received, peers.index)
    return own


def _filled_up(peers: Peers, flat: Tensor, bounds: Sequence[int], own: Tensor) -> Tensor:
    places = [peers.of_group(peer) for peer in range(peers.size)]
    memory: Tensor | None = None
    for pieces in _pieces(flat, bounds):
        most = max(map(len, pieces))
        if memory is None:  # one for all pieces, of which the first are the longest
            memory = flat.new_empty(peers.size * most)
        room = memory[: peers.size * most].view(peers.size, most)
        for place, piece in zip(places, pieces, strict=True):
            room[place, : len(piece)] = piece
            room[place, len(piece) :] = 0.0
        total = peers.sum_of_parts(room.view(-1), room[places[peers.index]])
        pieces[peers.index].copy_(total[: len(pieces[peers.index])])
    return own


def _pieces(flat: Tensor, bounds: Sequence[int]) -> list[list[Tensor]]:
    """The flat tensor in pieces: for each piece a list with one slice for each rank, of at most `piece_elements`."""
    most, piece = max(stop - start for start, stop in pairwise(bounds)), piece_elements(len(bounds) - 1)
    return [
        [flat[min(start + at, stop) : min(start + at + piece, stop)] for start, stop in pairwise(bounds)]
        for at in range(0, most, piece)
    ]


def _sum_into(parts: Sequence[Tensor], index: int) -> None:
    """The sum in the order of the ranks, into the part with this index: of two, either may be first."""
    own, before = parts[index], parts[:index]
    if before:
        total = before[0]
        for part in before[1:]:
            total += part
        own += total
    for part in parts[index + 1 :]:
        own += part
