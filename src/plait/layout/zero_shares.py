"""What of a role's flat buffers one rank updates, and what it counts of a norm over all ranks. Imports no torch.

ZeRO-1 (Rajbhandari et al. 2019, arXiv 1910.02054, section 5): of the flat buffer of its stage and tensor-parallel place
every dp rank updates one equal range, and holds the masters and moments of that alone. A parameter that the first and
the last stage both hold (a tied embedding) is updated on the first, and stands in front of the last one's buffer.

Positions are elements of the working buffer (`model.trained.layout`), whatever the rank updates of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from plait.layout.mesh import Coordinates, Parallelism
from plait.layout.params import Block, FlatLayout, Parameters
from plait.layout.shards import has_two_holders, shard, zero_range


@dataclass(frozen=True)
class UpdatedRange:
    """[start, stop) of the working buffer: a parameter's block, or a part of it."""

    start: int
    stop: int
    is_matrix: bool
    """Whether it belongs to a parameter of two or more dims; the biases of several experts in one are vectors."""


@dataclass(frozen=True)
class Share:
    """What one rank updates, and what it counts.

    bounds:  rank `i` of dp updates [bounds[i], bounds[i + 1])
    pieces:  what this rank updates, in order
    counted: what it counts of a norm: no element is counted by two ranks. Runs include the gaps inside, which hold 0
    tied:    ranges that the other end of the pipeline holds too
    """

    bounds: tuple[int, ...]
    start: int
    stop: int
    pieces: tuple[UpdatedRange, ...]
    counted: tuple[tuple[int, int], ...]
    tied: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls, layout: FlatLayout, counted: Sequence[tuple[int, int]], sizes: Parallelism, place: Coordinates
    ) -> Share:
        """The share of the rank at `place`.

        Args:
            layout: of the rank's working buffer.
            counted: blocks of it that this rank counts among the ranks of its copy of the model.
        """
        is_end = sizes.pp > 1 and place.pp in (0, sizes.pp - 1)
        doubled = [entry for entry in layout.entries if is_end and has_two_holders(entry[0].param)]
        skipped = len(doubled) if place.pp > 0 else 0
        assert all(mine is theirs for mine, theirs in zip(layout.entries, doubled[:skipped], strict=False)), (
            "what the last stage shares with the first stands in front of its buffer"
        )
        first = layout.num_elements if skipped == len(layout.entries) else layout.entries[skipped][1]
        cuts = [zero_range(layout.num_elements - first, index, sizes.dp) for index in range(sizes.dp)]
        bounds = (*(first + low for low, _ in cuts), first + cuts[-1][1])
        start, stop = bounds[place.dp], bounds[place.dp + 1]
        blocks = layout.entries[skipped:]
        pieces = [
            UpdatedRange(max(low, start), min(high, stop), _is_matrix(block))
            for block, low, high in blocks
            if max(low, start) < min(high, stop)
        ]
        counts = set(counted)
        own = [(max(low, start), min(high, stop)) for _, low, high in blocks if (low, high) in counts]
        return cls(
            bounds=bounds,
            start=start,
            stop=stop,
            pieces=tuple(pieces),
            counted=_runs([(low, high) for low, high in own if low < high], pieces, start, stop),
            tied=tuple((low, high) for _, low, high in doubled),
        )


def tied_pieces(
    layout: FlatLayout, parameters: Parameters, sizes: Parallelism, place: Coordinates
) -> list[tuple[int, int, int]]:
    """(dp rank, start, stop): how the ranks of dp divide what the first and the last stage both hold. The first updates
    it, and its shares say so; start and stop are places in the working buffer of the rank at `place`.

    Args:
        layout: of that buffer; empty is what the stages between have.
        parameters: of the whole model.
    """
    if sizes.pp == 1 or place.pp not in (0, sizes.pp - 1):
        return []
    first = shard(parameters, sizes, place.tp, 0)
    starts = {block.param.name: start for block, start, _ in first.entries}
    cuts = [zero_range(first.num_elements, index, sizes.dp) for index in range(sizes.dp)]
    pieces = []
    for block, start, stop in layout.entries:
        if has_two_holders(block.param):
            shift = start - starts[block.param.name]
            ranges = [(max(low + shift, start), min(high + shift, stop)) for low, high in cuts]
            pieces += [(owner, low, high) for owner, (low, high) in enumerate(ranges) if low < high]
    return pieces


class OwnedRange(NamedTuple):
    """A range of the working buffer, and the rank of dp that has it: the sum of its gradients, or its weights."""

    start: int
    stop: int
    owner: int
    """Index along dp."""
    at: int
    """Its place among all that the owner has."""


def owned_ranges(
    layout: FlatLayout, parameters: Parameters, sizes: Parallelism, place: Coordinates, bounds: Sequence[int]
) -> tuple[list[OwnedRange], list[slice]]:
    """Which rank of dp has what of the working buffer: what it updates, and behind it, on the last stage, its part of
    what the first stage updates. Also, of the rank at `place`, where among what it has is what both ends hold.

    Args:
        layout, parameters: as of `tied_pieces`.
        bounds: of `Share`.
    """
    owned = [OwnedRange(start, stop, owner, 0) for owner, (start, stop) in enumerate(pairwise(bounds))]
    ends, tied = [stop - start for start, stop in pairwise(bounds)], list[slice]()
    for owner, start, stop in tied_pieces(layout, parameters, sizes, place):
        at = start - bounds[owner]
        if place.pp > 0:
            at = ends[owner]
            owned.append(OwnedRange(start, stop, owner, at))
            ends[owner] += stop - start
        if owner == place.dp:
            tied.append(slice(at, at + stop - start))
    return owned, tied


def _is_matrix(block: Block) -> bool:
    return len(block.shape) >= 2 and not block.param.name.endswith("bias")


def _runs(
    counted: list[tuple[int, int]], pieces: list[UpdatedRange], start: int, stop: int
) -> tuple[tuple[int, int], ...]:
    """Neighbours as one run; where all is counted, the whole range of the rank."""
    if len(counted) == len(pieces):
        return ((start, stop),) if start < stop else ()
    runs: list[tuple[int, int]] = []
    follows = {piece.start: before.stop for before, piece in pairwise(pieces)}
    for low, high in counted:
        if runs and follows.get(low) == runs[-1][1]:
            runs[-1] = (runs[-1][0], high)
        else:
            runs.append((low, high))
    return tuple(runs)
