"""Where the gradients of a mini-batch are summed: whole on every rank, or on each the share alone that it updates.

Whole: a rank adds up those of its micro-batches, and at the end of the mini-batch the ranks' are summed: one exchange.

Shares (ZeRO-2: Rajbhandari et al. 2019, arXiv 1910.02054, section 5.2): while a backward runs, each run of parameters
whose gradients are complete is summed over the ranks and added to the shares of those that update them, and is freed.
No rank ever holds more than its share and the few gradients that wait. What is exchanged grows with the micro-batches,
and the sums are over ranks first: results are those of whole gradients but for rounding.

A run is on its way while the backward goes on: it is added to the shares when the room that it lies in is needed again.
Runs are cut and ordered as gradients come, or the first would hold up all others: of a layer matrices from the last to
the first, then the norms that stand behind them, as that of its inputs comes when all else of the layer has.
All ranks of dp reduce the same runs in the same order, whatever the order in which their gradients come. A rank that
has fewer micro-batches than others takes part with zeros. Copies of a model in stages go through these in one order
(`passes`), so that no two wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from plait.kernels import fused_rows
from plait.layout.params import Param, aligned
from plait.layout.shards import largest_in_layers
from plait.layout.zero_shares import Share, owned_ranges
from plait.models.backbone_model import TrainedWeights
from plait.models.parallel.reduce_scatter import reduce_scatter
from plait.models.parallel.team import Team
from plait.models.parallel.transfer import Transfer
from plait.training.memory import RUN_ELEMENTS, num_rooms

CACHE_CHUNK = 1 << 15
"""Elements whose widened copy stays in a CPU's cache."""


class Gradients(Protocol):
    """The gradients of one role's trained parameters, in the master dtype."""

    flat: Tensor
    """[E], gradients of all of the rank's working weights, or of its share. No call leaves its numbers to the next."""
    own: Tensor
    """[E of the share], that of this rank, a view of `flat`."""
    rooms: Sequence[Tensor]
    """Each [elements of a run at most]: where runs are summed before they come to `flat`. Their numbers are of one
    micro-batch."""
    in_each: bool
    """Whether the ranks of dp sum up in every micro-batch, and not at the end of a mini-batch alone."""

    def zero(self) -> None:
        """A mini-batch begins."""
        ...

    def take(self, entry: int, gradient: Tensor) -> None:
        """A backward has completed the gradient of an entry of the layout.

        Args:
            entry: its number in the layout.
            gradient: of the entry's shape, in the compute dtype.
        """
        ...

    def settle(self, layer: int | None) -> None:
        """A backward has come to the output of a layer, or to its end (None): the gradients of what is behind are
        complete, and those that did not come are 0."""
        ...

    def end_micro_batch(self) -> None:
        """A micro-batch has ended on this rank: its backward, or its turn if the rank has no samples in it."""
        ...

    def reduce(self) -> None:
        """A mini-batch has ended: make `own` the sum over all ranks that computed a part of the mini-batch."""
        ...


class WholeGradients:
    """See the top of the file.

    Args:
        team: the ranks that hold the model.
        share: of this rank.
    """

    in_each = False

    def __init__(self, trained: TrainedWeights, team: Team, share: Share, dtype: torch.dtype) -> None:
        self._trained, self._dp, self._share = trained, team.dp, share
        self.flat = torch.zeros(trained.layout.num_elements, dtype=dtype, device=trained.flat.device)
        self.own = self.flat[share.start : share.stop]
        self.rooms: Sequence[Tensor] = ()

    def zero(self) -> None:
        self.flat.zero_()

    def take(self, entry: int, gradient: Tensor) -> None:
        """See `Gradients.take`: of the entry's shape."""
        _, start, stop = self._trained.layout.entries[entry]
        add_widened(self.flat[start:stop].view(gradient.shape), gradient)

    def settle(self, layer: int | None) -> None:
        pass

    def end_micro_batch(self) -> None:
        pass

    def reduce(self) -> None:
        self._trained.sum_partial_gradients(self.flat)
        reduce_scatter(self._dp, self.flat, self._share.bounds)


class ShardedGradients:
    """See the top of the file. Arguments are those of `WholeGradients`.

    What the last stage has of a tied embedding's gradient is divided as the first divides it, which updates it, and
    added to that at the end of the mini-batch. It stands behind the share.
    """

    in_each = True

    def __init__(self, trained: TrainedWeights, team: Team, share: Share, dtype: torch.dtype) -> None:
        self._trained, self._dp = trained, team.dp
        place = team.layout.parallelism, team.coordinates
        self._owned, self._tied = owned_ranges(trained.layout, trained.parameters, *place, share.bounds)
        self._entries = trained.layout.entries
        self._runs = runs_of([block.param for block, _, _ in self._entries])
        self._next = 0
        self._waiting: dict[int, Tensor] = {}
        """Entry → its gradient, complete and not reduced yet."""
        device, own = trained.flat.device, share.stop - share.start
        self.flat = torch.zeros(max([own, *(at.stop for at in self._tied)]), dtype=dtype, device=device)
        self.own = self.flat[:own]
        size = min(RUN_ELEMENTS, trained.layout.num_elements)
        rooms = range(num_rooms(largest_in_layers(trained.layout)))
        self.rooms: Sequence[Tensor] = [torch.empty(size, dtype=dtype, device=device) for _ in rooms]
        self._sums: list[list[tuple[Transfer, Tensor | None]]] = [[] for _ in rooms]
        """By room: a sum on its way, and what of the own share it is to be added to."""
        self._num_reduced = 0

    def zero(self) -> None:
        self.flat.zero_()

    def take(self, entry: int, gradient: Tensor) -> None:
        """See `Gradients.take`: of the entry's shape."""
        assert entry not in self._waiting, "a backward completes the gradient of a parameter once"
        self._waiting[entry] = gradient
        while self._next < len(self._runs) and all(at in self._waiting for at in self._runs[self._next]):
            self._reduce_next()

    def settle(self, layer: int | None) -> None:
        """See `Gradients.settle`: whatever has come on this rank, the runs behind the layer are on their way now."""
        while self._next < len(self._runs) and (layer is None or self._is_behind(self._runs[self._next], layer)):
            self._reduce_next()

    def _is_behind(self, run: range, layer: int) -> bool:
        """Whether all of a run stands behind a layer, and behind what stands before the first."""
        layers = [block.param.layer for block, _, _ in self._entries]
        first = next((at for at, of_entry in enumerate(layers) if of_entry is not None), len(layers))
        return run.start >= first and all(of_entry is None or of_entry > layer for of_entry in layers[run.start :])

    def end_micro_batch(self) -> None:
        self.settle(None)
        assert not self._waiting, "no gradient comes when its run has been reduced"
        self._next = 0
        for at in range(len(self.rooms)):
            self._take_room(self._num_reduced + at)

    def reduce(self) -> None:
        self._trained.sum_over_ends([self.flat[at] for at in self._tied])

    def _reduce_next(self) -> None:
        """Sum a run over the ranks and add it to the shares; gradients that did not come are 0."""
        run = self._runs[self._next]
        self._next += 1
        gradients = {at: self._waiting.pop(at) for at in run if at in self._waiting}
        end = self._entries[run[-1]][2]
        for low in range(self._entries[run[0]][1], end, RUN_ELEMENTS):  # more than one for a single large entry alone
            room = self._take_room(self._num_reduced)[: min(RUN_ELEMENTS, end - low)].zero_()
            parts = {}
            for at in run:
                block, start, stop = self._entries[at]
                part = room[max(start - low, 0) : max(stop - low, 0)]
                if at in gradients:
                    part.copy_(gradients[at].reshape(-1)[max(low - start, 0) :][: len(part)])
                parts[block.param.name] = part
            self._trained.sum_over_tp(parts)
            self._begin_sums(low, room)

    def _begin_sums(self, low: int, parts: Tensor) -> None:
        """The sum over dp of what stands behind `low` in the buffer of all weights, on the ranks that update it."""
        sums = self._sums[self._num_reduced % len(self.rooms)]
        self._num_reduced += 1
        for owned in self._owned:
            first, last = max(owned.start, low), min(owned.stop, low + len(parts))
            if first < last:
                own = None
                if owned.owner == self._dp.index:
                    own = self.flat[first - owned.start + owned.at :][: last - first]
                sums.append((self._dp.begin_reduce(parts[first - low : last - low], owned.owner), own))

    def _take_room(self, number: int) -> Tensor:
        """The room of a run; what is on its way in it arrives before."""
        for summed, own in self._sums[number % len(self.rooms)]:
            total = summed.wait()
            if own is not None:
                own += total
        self._sums[number % len(self.rooms)].clear()
        return self.rooms[number % len(self.rooms)]


def runs_of(params: Sequence[Param]) -> tuple[range, ...]:
    """Neighbours that have at most `RUN_ELEMENTS` together, or one that alone has more, in the order in which a
    backward completes them. A layer that has more is in runs of its own, what stands behind its last matrix in the last
    of them.

    Args:
        params: the entries of a layout. Those of all ranks of tensor parallelism together count, so that these cut
            alike.
    """
    sizes = [aligned(param.num_elements) for param in params]
    runs: list[range] = []
    small = range(len(params), len(params))  # whole layers, not cut yet
    for _, of_layer in groupby(reversed(range(len(params))), lambda at: params[at].layer):
        places = range((own := list(of_layer))[-1], own[0] + 1)
        if sum(sizes[places.start : small.stop]) <= RUN_ELEMENTS:
            small = range(places.start, small.stop)
            continue
        runs += [small] if small else []
        small = range(places.start, places.start)
        if sum(sizes[at] for at in places) <= RUN_ELEMENTS:
            small = places
            continue
        behind = 1 + max((at for at in places if len(params[at].shape) > 1), default=places.stop - 1)
        runs += [*_cut(sizes, places.start, behind), *_cut(sizes, behind, places.stop)]
    return (*runs, small) if small else tuple(runs)


def _cut(sizes: Sequence[int], start: int, stop: int) -> Iterator[range]:
    """The entries start … stop − 1, from the last to the first."""
    last, total = stop, 0
    for at in reversed(range(start, stop)):
        if total and total + sizes[at] > RUN_ELEMENTS:
            yield range(at + 1, last)
            last, total = at + 1, 0
        total += sizes[at]
    if start < last:
        yield range(start, last)


def add_widened(flat: Tensor, gradient: Tensor) -> None:
    """flat += gradient, of one shape, in the dtype of `flat`."""
    if flat.dtype == gradient.dtype or flat.device.type != "cpu":
        flat.add_(gradient)
        return
    if fused_rows.takes(gradient) and flat.dtype == torch.float32:
        fused_rows.add_widened(flat, gradient.contiguous())
        return
    # A CPU sum of two dtypes is not vectorised: widening pieces first takes a quarter of its time.
    pieces = zip(flat.view(-1).split(CACHE_CHUNK), gradient.reshape(-1).split(CACHE_CHUNK), strict=True)
    for target, source in pieces:
        target.add_(source.to(flat.dtype))
