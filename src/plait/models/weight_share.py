"""What one rank of dp holds of the weights of its part of a model, where ranks of dp hold shares (ZeRO-3: Rajbhandari
et al. 2019, arXiv 1910.02054, section 5.3).

The share is that of the masters, in the compute dtype: an optimizer step writes it, and needs no message for that.
Whoever computes gathers what it computes with (`parallel.gathered_layers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from plait.layout.params import Block, FlatLayout
from plait.layout.zero_shares import OwnedRange
from plait.models.parallel.peers import Peers


class WeightShare:
    """Some of the elements [0, num_elements) of a flat layout; as `FlatWeights`, but for what other ranks hold.

    Args:
        owned: what each rank of dp holds (`zero_shares.owned_ranges`).
        index: of this rank along dp.
        like: of the dtype and on the device of the weights; of any shape.
    """

    def __init__(self, layout: FlatLayout, owned: Sequence[OwnedRange], index: int, like: Tensor) -> None:
        self.layout = layout
        self.owned = tuple(owned)
        self._held = [one for one in owned if one.owner == index]
        length = max((one.at + one.stop - one.start for one in self._held), default=0)
        self.whole = torch.zeros(length, dtype=like.dtype, device=like.device)
        """The one buffer: [elements that this rank holds]."""
        nothing = torch.full((1,), float("nan"), dtype=like.dtype, device=like.device)
        self.placeholders = tuple(nothing.expand(block.shape) for block in layout.blocks)
        """What stands for each block, in its shape, while it is not gathered: no number, and no memory."""

    @property
    def own(self) -> Tensor:
        """What this rank updates, the front of the buffer: [elements]."""
        return self.whole[: next((one.stop - one.start for one in self._held if not one.at), 0)]

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @property
    def device(self) -> torch.device:
        return self.whole.device

    @property
    def version(self) -> int:
        """Another after every write to the buffer."""
        return self.whole._version

    def flat(self, device: torch.device | str) -> Tensor:
        """What this rank updates, on a device; it may be the buffer itself: [elements]."""
        return self.own.to(device)

    def view(self, low: int, high: int) -> Tensor:
        """Elements [low, high), which this rank holds in a row: [high - low], as they lie."""
        if low == high:
            return self.whole[:0]
        [(start, stop, view)] = self.pieces(low, high)
        assert (start, stop) == (low, high), f"elements {low} to {high} are another rank's, in part"
        return view

    def read(self, low: int, high: int, out: Tensor) -> Tensor:
        """Copy elements [low, high), which this rank holds, to `out` [high - low], which may be of another dtype.
        Returns it."""
        return out.copy_(self.view(low, high))

    def write(self, low: int, high: int, values: Tensor) -> None:
        """Overwrite elements [low, high), which this rank holds, by `values` [high - low], perhaps of another dtype."""
        self.view(low, high).copy_(values)

    def take(self, block: Block, start: int, values: Tensor) -> None:
        """Take of a block, which begins at element `start`, what this rank holds. Values: of the block's shape."""
        flat = values.detach().reshape(-1)
        for low, high, view in self.pieces(start, start + block.num_elements):
            view.copy_(flat[low - start : high - start])

    def all_gather(self, peers: Peers, bounds: Sequence[int]) -> None:
        """Nothing: each rank holds what it updates."""

    def broadcast(self, peers: Peers, low: int, high: int, source: int) -> None:
        """Overwrite what this rank holds of the elements [low, high) by what the peer with index `source` has of
        them, which holds the same."""
        for _, _, view in self.pieces(low, high):
            peers.broadcast(view, source)

    def pieces(self, low: int, high: int) -> Iterator[tuple[int, int, Tensor]]:
        """(start, stop, view) of what this rank holds of the elements [low, high)."""
        for one in self._held:
            start, stop = max(low, one.start), min(high, one.stop)
            if start < stop:
                yield start, stop, self.whole[one.at + start - one.start : one.at + stop - one.start]
