"""The weights of a rank's part as one flat range of elements, wherever its blocks lie.

Alone, a part is one flat buffer. Where a larger part of the same model is on the rank, its blocks are views in the
memory of that, strided where they are cut along another dim than the first (`layout.nesting`). The optimizer and what
passes between ranks go by places in the flat layout; here they are read and written without a second copy of the
weights: in pieces of a bounded size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from plait.layout.boxes import Holding
from plait.layout.params import Block, FlatLayout
from plait.models.parallel.peers import Peers
from plait.models.parallel.reduce_scatter import PIECE_ELEMENTS, piece_elements


class FlatWeights:
    """Elements [0, num_elements) of a flat layout. Where the blocks lie in several places, gaps between them read as
    zeros, and what is written there is lost.

    Args:
        whole: the one flat buffer [layout.num_elements] that blocks lie in as the layout says; None: they do not.
        views: then, of each block in its shape; of a strided one the last dim is dense.
    """

    def __init__(self, layout: FlatLayout, whole: Tensor | None, views: Sequence[Tensor] = ()) -> None:
        if whole is None:
            assert len(views) == len(layout.blocks), f"expected {len(layout.blocks)} blocks, found {len(views)}"
        else:
            assert whole.shape == (layout.num_elements,), f"expected {layout.num_elements} elements: {whole.shape}"
        self.layout = layout
        self.whole = whole
        self._views = tuple(views)
        self._memory = tuple({view.untyped_storage().data_ptr(): view for view in views}.values())
        """A view of each buffer: their versions are those of the buffers."""

    @classmethod
    def nested(cls, layout: FlatLayout, held: Sequence[Holding], buffers: Mapping[str, Tensor]) -> FlatWeights:
        """Weights of blocks that lie in several buffers.

        Args:
            held: where each block of the layout lies, in order (`nesting.AliasedPart`).
            buffers: flat [elements], by name.
        """
        views = []
        for block, (_, of_block) in zip(layout.blocks, groupby(held, lambda holding: holding.param), strict=True):
            holding, *others = of_block
            buffer = buffers[holding.buffer]
            if others:  # ranges of several sections, close together
                views.append(buffer[holding.offset : holding.offset + block.num_elements].view(block.shape))
                continue
            grid = buffer.as_strided(holding.box.shape, holding.strides, buffer.storage_offset() + holding.offset)
            views.append(grid.view(block.shape))
        return cls(layout, None, views)

    @property
    def views(self) -> tuple[Tensor, ...]:
        """Each block of the layout, in its shape."""
        if self.whole is None:
            return self._views
        return tuple(self.whole[start:stop].view(block.shape) for block, start, stop in self.layout.entries)

    @property
    def num_elements(self) -> int:
        return self.layout.num_elements

    @property
    def dtype(self) -> torch.dtype:
        return self._any.dtype

    @property
    def device(self) -> torch.device:
        return self._any.device

    @property
    def _any(self) -> Tensor:
        return self._views[0] if self.whole is None else self.whole

    @property
    def version(self) -> int:
        """Another after every write to the memory that some of it lies in."""
        memory = self._memory if self.whole is None else (self.whole,)
        return sum(view._version for view in memory)

    def read(self, low: int, high: int, out: Tensor) -> Tensor:
        """Copy elements [low, high) to `out` [high - low], which may be of another dtype. Returns it."""
        end = low
        for start, stop, view in self._pieces(low, high):
            out[end - low : start - low].zero_()
            out[start - low : stop - low].view(view.shape).copy_(view)
            end = stop
        out[end - low :].zero_()
        return out

    def write(self, low: int, high: int, values: Tensor) -> None:
        """Overwrite elements [low, high) by `values` [high - low], perhaps of another dtype."""
        for start, stop, view in self._pieces(low, high):
            view.copy_(values[start - low : stop - low].view(view.shape))

    def flat(self, device: torch.device | str) -> Tensor:
        """All of it as one flat buffer [num_elements] on a device: itself, if it is that."""
        if self.whole is not None:
            return self.whole.to(device)
        out = torch.empty(self.num_elements, dtype=self.dtype, device=device)
        return self.read(0, self.num_elements, out)

    def sampled(self, step: int) -> Tensor:
        """Elements 0, `step`, 2 `step`, …: [⌈num_elements / step⌉], a view where it is one buffer."""
        if self.whole is not None:
            return self.whole[::step]
        out = torch.zeros(-(-self.num_elements // step), dtype=self.dtype, device=self.device)
        for (_, first, last), view in zip(self.layout.entries, self._views, strict=True):
            low, high = -(-first // step), -(-last // step)
            places = torch.arange(low, high, device=self.device) * step - first
            rows = _rows(view)
            out[low:high] = rows[places // rows.shape[1], places % rows.shape[1]]
        return out

    def all_gather(self, peers: Peers, bounds: Sequence[int]) -> None:
        """Fill it where each peer has its own range: `bounds[i]` to `bounds[i + 1]` of the one with index i.

        Peers may lie in different ways: messages are the same.
        """
        if peers.size == 1:
            return
        most, piece = max(stop - start for start, stop in pairwise(bounds)), piece_elements(peers.size)
        for at in range(0, most, piece):
            ranges = [(min(start + at, stop), min(start + at + piece, stop)) for start, stop in pairwise(bounds)]
            parts = [self._room(low, high) for low, high in ranges]
            self._fill(*ranges[peers.index], parts[peers.index])
            peers.all_gather_into(parts)
            for index, (low, high) in enumerate(ranges):
                if index != peers.index:
                    self._take(low, high, parts[index])
            del parts  # before there are others

    def broadcast(self, peers: Peers, low: int, high: int, source: int) -> None:
        """Overwrite elements [low, high) by those of the peer with index `source`; there, too, they are a range, not
        necessarily the same."""
        for at in range(low, high, PIECE_ELEMENTS):
            stop = min(at + PIECE_ELEMENTS, high)
            part = self._room(at, stop)
            if peers.index == source:
                self._fill(at, stop, part)
            peers.broadcast(part, source)
            if peers.index != source:
                self._take(at, stop, part)

    def _room(self, low: int, high: int) -> Tensor:
        """[high - low] for a message: the elements themselves where they lie in a row, or else memory for them."""
        if self.whole is not None:
            return self.whole[low:high]
        return torch.empty(high - low, dtype=self.dtype, device=self.device)

    def _fill(self, low: int, high: int, room: Tensor) -> None:
        if self.whole is None:
            self.read(low, high, room)

    def _take(self, low: int, high: int, room: Tensor) -> None:
        if self.whole is None:
            self.write(low, high, room)
        else:
            increment_version(self.whole)  # a message that came to where they lie does not

    def _pieces(self, low: int, high: int) -> Iterator[tuple[int, int, Tensor]]:
        """(start, stop, view) of what lies together in [low, high), in order, PIECE_ELEMENTS at most."""
        if self.whole is not None:
            for start in range(low, high, PIECE_ELEMENTS):
                stop = min(start + PIECE_ELEMENTS, high)
                yield start, stop, self.whole[start:stop]
            return
        for (_, first, last), view in zip(self.layout.entries, self._views, strict=True):
            start, stop = max(first, low), min(last, high)
            rows = _rows(view)
            while start < stop:
                row, column = divmod(start - first, rows.shape[1])
                count = (min(stop, start + PIECE_ELEMENTS) - start) // rows.shape[1]
                if column or not count:
                    length = min(rows.shape[1] - column, stop - start, PIECE_ELEMENTS)
                    yield start, start + length, rows[row, column : column + length]
                    start += length
                else:
                    yield start, start + count * rows.shape[1], rows[row : row + count]
                    start += count * rows.shape[1]


def _rows(view: Tensor) -> Tensor:
    """[rows, elements that lie in a row] of a block."""
    if view.is_contiguous():
        return view.view(1, -1)
    assert view.ndim == 2, f"a block of {tuple(view.shape)} is no strided matrix: {view.stride()}"
    return view


def cut_block(whole: Tensor, block: Block) -> Tensor:
    """A rank's block of a whole parameter.

    Args:
        whole: of the parameter's shape; any dtype.

    Returns:
        [*block.shape] in the same dtype; a view where the block lies in one piece.
    """
    if block.param.cut is None:
        return whole
    grid = whole.reshape(block.param.grid)
    parts = [grid[:, start:stop] for start, stop in block.ranges]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).reshape(block.shape)
