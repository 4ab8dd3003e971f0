"""The weights of one layer at a time, of a model whose ranks of dp hold shares of them (`weight_share`).

A layer is gathered before it computes: whoever holds some of it sends that to all others (its share is a range of the
whole buffer, so one rank holds most layers whole; the sums of `training.gradients` go the other way). While one layer
computes, the next is on its way. There is room for two, which are written over in turn; parameters are views of a room
for as long as their layer is in use, and hold no numbers otherwise. What belongs to no layer (embedding, norm, head) is
gathered once for a forward, or a backward, and stays until its end.

An autograd graph keeps the weights that its backward reads. Here it keeps where in a layer they lie, and finds them in
the room that the layer is gathered to again (`saved_tensors_hooks`); layers that are computed again keep none.

All ranks of dp gather the same in the same order, by program order alone: layers ascending in a forward, descending in
a backward, with the sums of gradients that are complete in between. A rank that has no samples where others have some
goes the same way without computing (`idle_forward`, `idle_backward`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from plait.layout.shards import GATHERED_LAYERS
from plait.models.layer_weights import Settle
from plait.models.parallel.gathered_units import Room, Unit, check_aliases, modules_of, unit_of
from plait.models.parallel.peers import Peers
from plait.models.weight_share import WeightShare


class GatheredLayers:
    """See the top of the file, and `LayerWeights`.

    Args:
        module: of Transformers, cut already; its parameters become views of rooms.
        share: of this rank.
        dp: the ranks that hold the other shares.

    Raises:
        ModelError: the module's layers are not one behind another, each with weights of its own.
    """

    is_gathered: ClassVar[bool] = True

    def __init__(self, module: nn.Module, share: WeightShare, dp: Peers) -> None:
        self._share, self._dp = share, dp
        check_aliases(share)
        layers = dict.fromkeys(block.param.layer for block in share.layout.blocks)
        self._units = {layer: unit_of(share, layer, module) for layer in layers}
        self.layers = sorted(layer for layer in self._units if layer is not None)
        """Numbers of those of this rank's stage."""
        self._rooms: list[Room] = []
        self._ends: Room | None = None
        self._in_use: Room | None = None
        self._expected = 0
        self._settle: Settle = _settle_nothing
        for layer, name in modules_of(share).items():
            own = module.get_submodule(name)
            own.register_forward_pre_hook(_Enter(self, layer))
            own.register_forward_hook(_Leave(self, layer))
        for unit in self._units.values():
            self._unbind(unit)

    @property
    def room_elements(self) -> tuple[int, ...]:
        """Elements of each room, that of what belongs to no layer first."""
        largest = max((self._units[layer].num_elements for layer in self.layers), default=0)
        ends = self._units[None].num_elements if None in self._units else 0
        return ends, *[largest] * GATHERED_LAYERS

    # -- passes

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Within it the module computes; what its backward reads of the weights is kept as places."""
        self._expected = 0
        try:
            self._begin()
            self._prefetch(0)
            with torch.autograd.graph.saved_tensors_hooks(self._packed, self._unpacked):
                yield
        finally:
            self._end()

    @contextmanager
    def backward(self, settle: Settle) -> Iterator[None]:
        """Within it a backward of what was computed in `forward` runs."""
        self._settle = settle
        try:
            self._begin()
            self._prefetch(len(self.layers) - 1)
            yield
        finally:
            self._settle = _settle_nothing
            self._end()

    def idle_forward(self) -> None:
        """This rank has no samples where others have some: it takes part in what they gather."""
        with self.forward():
            for layer in self.layers:
                self.enter(layer)

    def idle_backward(self, settle: Settle, lowest: int | None) -> None:
        """The same of a backward.

        Args:
            lowest: the first layer that a gradient comes to; None: none comes to any.
        """
        with self.backward(settle):
            for layer in reversed(self.layers if lowest is not None else ()):
                if layer >= (lowest or 0):
                    self.come_back(layer)

    @contextmanager
    def having(self, layer: int | None) -> Iterator[None]:
        """Within it the parameters of this layer, and of none, have their numbers. All ranks call it together."""
        try:
            self._begin()
            if layer is not None:
                self._take(self.layers.index(layer))
            yield
        finally:
            self._end()
            self.rest()

    def enter(self, layer: int) -> None:
        """A layer is about to compute in a forward."""
        number = self.layers.index(layer)
        assert number == self._expected, f"layer {layer} computes where another was expected: each does once, in order"
        self._expected += 1
        self._take(number)
        self._prefetch(number + 1)

    def come_back(self, layer: int) -> None:
        """A backward has come to the output of a layer: that of those behind it is over."""
        number = self.layers.index(layer)
        self._settle(layer)
        self._take(number)
        self._prefetch(number - 1)

    def rest(self) -> None:
        """Let the rooms go: nothing is computed for a while, or the weights change."""
        for room in self.rooms:
            room.wait()
        self._rooms, self._ends, self._in_use = [], None, None

    # -- rooms

    @property
    def rooms(self) -> list[Room]:
        """Those that there are; none while nothing computes."""
        return [*self._rooms, *([] if self._ends is None else [self._ends])]

    def _begin(self) -> None:
        """Make rooms where there are none, and gather what belongs to no layer."""
        if not self._rooms:
            ends, *sizes = self.room_elements
            room = lambda size: Room(torch.empty(size, dtype=self._share.dtype, device=self._share.device))
            self._ends, self._rooms = room(ends), [room(size) for size in sizes]
        self._in_use = None
        if None in self._units:
            assert self._ends is not None, "rooms were made"
            self._gather(self._units[None], self._ends)
            self._bind(self._units[None], self._ends)

    def _end(self) -> None:
        """The pass is over: parameters hold no numbers; what was gathered stays in its rooms."""
        for room in self.rooms:
            if room.unit is not None:
                self._unbind(room.unit)
        self._in_use = None

    def _take(self, number: int) -> None:
        """Put the weights of a layer (by its number within this stage) in use, and those of the previous one out of
        it."""
        unit = self._units[self.layers[number]]
        if (room := next((room for room in self._rooms if room.unit is unit), None)) is None:
            self._prefetch(number)
            room = next(room for room in self._rooms if room.unit is unit)
        if self._in_use is not None and self._in_use is not room and self._in_use.unit is not None:
            self._unbind(self._in_use.unit)
        self._bind(unit, room)
        self._in_use = room

    def _prefetch(self, number: int) -> None:
        """Begin to gather a layer, if there is one with this number, into a room that is not in use."""
        if not 0 <= number < len(self.layers):
            return
        unit = self._units[self.layers[number]]
        if all(room.unit is not unit for room in self._rooms):
            self._gather(unit, next(room for room in self._rooms if room is not self._in_use))

    def _gather(self, unit: Unit, room: Room) -> None:
        if room.unit is unit:
            return
        room.wait()
        room.unit = unit
        for start, stop, at in unit.ranges:
            for owned in self._share.owned:
                low, high = max(start, owned.start), min(stop, owned.stop)
                if low < high:
                    part = room.memory[at + low - start : at + high - start]
                    if owned.owner == self._dp.index:
                        part.copy_(self._share.view(low, high))
                    room.arriving.append(self._dp.begin_broadcast(part, owned.owner))

    def _bind(self, unit: Unit, room: Room) -> None:
        room.wait()
        for one in unit.params:
            shape = one.placeholder.shape
            one.param.data = room.memory[one.at : one.at + shape.numel()].view(shape)

    def _unbind(self, unit: Unit) -> None:
        for one in unit.params:
            one.param.data = one.placeholder

    # -- what a graph keeps

    def _packed(self, tensor: Tensor) -> Tensor | _Place:
        """Where a tensor of any shape lies in a room; itself, if it lies in none."""
        address = tensor.untyped_storage().data_ptr()
        for room in self.rooms:
            if room.unit is not None and address == room.memory.untyped_storage().data_ptr() and tensor.numel():
                return _Place(room.unit, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
        return tensor

    def _unpacked(self, packed: Tensor | _Place) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        room = next((room for room in self.rooms if room.unit is packed.unit), None)
        assert room is not None, "a backward reads weights of a layer that it has not come to"
        return room.memory.as_strided(packed.shape, packed.strides, packed.offset)


class _Place(NamedTuple):
    """Where a tensor lies in the room that a unit is gathered to."""

    unit: Unit
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(eq=False)
class _Enter:
    """Hook before the forward of a layer."""

    gathered: GatheredLayers
    layer: int

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.gathered.enter(self.layer)


@dataclass(eq=False)
class _Leave:
    """Hook behind the forward of a layer: its output tells when the backward comes to it."""

    gathered: GatheredLayers
    layer: int

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad and torch.is_grad_enabled():
            hidden.register_hook(self._come_back)

    def _come_back(self, gradient: Tensor) -> None:
        """Called with the gradient of an output [1, T, H], which stays as it is."""
        self.gathered.come_back(self.layer)


def _settle_nothing(layer: int | None) -> None:
    """Outside of a backward of training."""
