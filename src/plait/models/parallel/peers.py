"""Ranks along one axis of a team, as one of them sees them: collectives and messages, counted, with deadlines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from plait.errors import RunError, why_not_through
from plait.models.parallel import nccl
from plait.models.parallel.numbered import Numbered
from plait.models.parallel.transfer import Traffic, Transfer, WaitingFor

TIMEOUT_S = 1800.0
"""Seconds of each wait, unless told: longer than any legitimate action. Ranks that die or freeze are seen by the
launcher.
"""

FIRST_INNER_TAG = 1 << 30
"""Tags from here on are the collectives' own; messages of callers have lower ones."""

Op = Literal["sum", "max", "min"]


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True, eq=False)
class Peers(Numbered):
    """The ranks along one axis of a team, this one among them.

    Every call raises RunError where a peer is gone or does not answer until the deadline. `traffic` counts the bytes of
    all but `irecv`, whose messages are counted by whoever waits for them.
    """

    ranks: tuple[int, ...]
    """Global ranks, in the order of the axis."""
    index: int
    """Place of this rank in them."""
    axis: str = ""
    """For errors: `tp`, say."""
    group: Any = field(default=None, repr=False)
    """torch.distributed's; None where there is one rank."""
    timeout_s: float = TIMEOUT_S
    waiting_for: WaitingFor = field(default=lambda what: nullcontext(), repr=False)
    traffic: Traffic = field(default_factory=Traffic, repr=False)
    _rehearsing: list[bool] = field(default_factory=list, init=False, repr=False)

    @classmethod
    def alone(cls, rank: int = 0, axis: str = "") -> Peers:
        return cls((rank,), 0, axis)

    @property
    def is_rehearsing(self) -> bool:
        """See `rehearsing`."""
        return bool(self._rehearsing)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Within the context, `all_reduce` and `all_gather` send nothing and return this rank's own values; any other
        message is refused. So a rank can find out by itself whether it is able to compute something."""
        self._rehearsing.append(True)
        try:
            yield
        finally:
            self._rehearsing.pop()

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def in_order(self) -> bool:
        """Whether messages between two ranks meet in the order of posting, not by their tags."""
        return self.size > 1 and nccl.serves(self.group)

    def of_group(self, index: int) -> int:
        """The number in the process group, which counts its ranks ascending, of the rank with this index."""
        return sum(rank < self.ranks[index] for rank in self.ranks)

    def __deepcopy__(self, memo: dict[int, Any]) -> Peers:
        return self  # a copy of a module has the same peers

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        """Reduce over the ranks, in place; equal bits on all of them. Returns the tensor.

        Args:
            tensor: contiguous, of one shape and dtype on all ranks.
        """
        if self.size > 1 and tensor.numel() and not self.is_rehearsing:
            assert tensor.is_contiguous(), "a tensor that is reduced in place is contiguous"
            self._finish(
                lambda: dist.all_reduce(tensor, _OPS[op], group=self.group, async_op=True), f"all_reduce {op}", tensor
            )
            self.traffic.received_bytes += 2 * _bytes(tensor) * (self.size - 1) // self.size
        return tensor

    def begin_reduce(self, tensor: Tensor, target: int) -> Transfer:
        """Begin to sum over the ranks, in place on the rank with index `target`; what the others' holds then is
        undefined. The tensor is contiguous, of one shape and dtype on all ranks."""
        if self.size == 1 or not tensor.numel():
            return Transfer(tensor, lambda: None)
        assert tensor.is_contiguous(), "a tensor that is reduced in place is contiguous"
        to = self.of_group(target)
        self.traffic.received_bytes += _bytes(tensor) * (self.size - 1) if target == self.index else 0
        what = f"reduce to rank {self.ranks[target]}"
        call = lambda: dist.reduce(tensor, group=self.group, group_dst=to, async_op=True)
        return Transfer(tensor, self._begin(call, what, tensor))

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Overwrite the tensor by that of the rank with index `source`. Returns it: contiguous, of one shape and dtype
        on all ranks."""
        return self.begin_broadcast(tensor, source).wait()

    def begin_broadcast(self, tensor: Tensor, source: int) -> Transfer:
        """Begin what `broadcast` does: contiguous, of one shape and dtype on all ranks."""
        if self.size == 1 or not tensor.numel():
            return Transfer(tensor, lambda: None)
        assert tensor.is_contiguous(), "a tensor that is written in place is contiguous"
        self.traffic.received_bytes += 0 if source == self.index else _bytes(tensor)
        what = f"broadcast of rank {self.ranks[source]}"
        call = lambda: dist.broadcast(tensor, group=self.group, group_src=self.of_group(source), async_op=True)
        return Transfer(tensor, self._begin(call, what, tensor))

    def all_gather(self, tensor: Tensor, lengths: Sequence[int] | None = None) -> list[Tensor]:
        """The tensor of every rank, by index, of one dtype on all of them.

        Args:
            lengths: of dim 0 on each rank, the other dims being equal; None: shapes are equal.
        """
        if self.size == 1:
            return [tensor]
        tensor = tensor.contiguous()
        if lengths is None:
            parts = [torch.empty_like(tensor) for _ in self.ranks]
        else:
            assert lengths[self.index] == len(tensor), f"said to have {lengths[self.index]} rows, has {len(tensor)}"
            most = max(lengths)
            own = tensor.new_zeros((most, *tensor.shape[1:]))
            own[: len(tensor)] = tensor
            tensor, parts = own, [torch.empty_like(own) for _ in self.ranks]
        if self.is_rehearsing:
            parts = [tensor] * self.size
        elif tensor.numel():
            self._finish(lambda: dist.all_gather(parts, tensor, group=self.group, async_op=True), "all_gather", tensor)
            self.traffic.received_bytes += _bytes(tensor) * (self.size - 1)
        parts = [parts[self.of_group(index)] for index in range(self.size)]
        if lengths is not None:
            parts = [part[:length] for part, length in zip(parts, lengths, strict=True)]
        return parts

    def sum_of_parts(self, parts: Tensor, own: Tensor) -> Tensor:
        """The backend's own reduce-scatter: the sum over the ranks of the part of this rank. Returns `own`.

        Args:
            parts: contiguous [size · n], the parts of the ranks ascending by number; of one shape and dtype on all.
            own: [n]; it may be this rank's part of `parts`.
        """
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its name from torch 2.13 on
        self._finish(lambda: scatter(own, parts, group=self.group, async_op=True), "reduce_scatter", parts)
        self.traffic.received_bytes += _bytes(own) * (self.size - 1)
        return own

    def all_gather_into(self, parts: Sequence[Tensor]) -> None:
        """Fill part i by that of the rank with index i, for every i but the own; each [elements] is contiguous, and has
        as many on all ranks."""
        if self.size == 1 or not nccl.carries(self.group, parts[self.index].device):
            self.exchange([parts[self.index]] * self.size, parts, "all_gather")
            return
        room = parts[self.index].new_empty(self.size, max(map(len, parts)))
        own = room[self.of_group(self.index)]
        own[: len(parts[self.index])] = parts[self.index]
        if room.numel():
            gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.13 on
            self._finish(lambda: gather(room.view(-1), own, group=self.group, async_op=True), "all_gather", own)
        for index, part in enumerate(parts):
            if index != self.index:
                part.copy_(room[self.of_group(index), : len(part)])
                self.traffic.received_bytes += _bytes(part)

    def barrier(self) -> None:
        """Until all ranks are here."""
        if self.size > 1:
            self._finish(lambda: dist.barrier(group=self.group, async_op=True), "barrier")

    def isend(self, tensor: Tensor, peer: int, tag: int, what: str = "") -> Transfer:
        """Begin to send a contiguous tensor of any shape and dtype to the rank with index `peer`.

        Args:
            tag: below FIRST_INNER_TAG; that of the receive on the other side.
            what: for errors: the action that it belongs to, `3F0` say.
        """
        assert tensor.is_contiguous(), "a tensor that is sent is contiguous"
        return self._post(dist.isend, "send", tensor, peer, tag, what)

    def irecv(self, tensor: Tensor, peer: int, tag: int, what: str = "") -> Transfer:
        """Begin to receive into a contiguous tensor, of the shape and dtype that is sent, from the rank with index
        `peer`; see `isend`."""
        assert tensor.is_contiguous(), "a tensor that is received into is contiguous"
        return self._post(dist.irecv, "recv", tensor, peer, tag, what)

    def send(self, tensor: Tensor, peer: int, tag: int, what: str = "") -> None:
        """`isend` of a tensor of any shape and dtype, and wait."""
        self.isend(tensor.contiguous(), peer, tag, what).wait()

    def recv(self, tensor: Tensor, peer: int, tag: int, what: str = "") -> Tensor:
        """`irecv` into a tensor of the shape and dtype that is sent, and wait. Returns the tensor."""
        self.irecv(tensor, peer, tag, what).wait()
        self.traffic.received_bytes += _bytes(tensor)
        return tensor

    def _post(self, call: Any, name: str, tensor: Tensor, peer: int, tag: int, what: str) -> Transfer:
        self._not_rehearsing()
        assert peer != self.index, f"a message of rank {self.ranks[peer]} to itself"
        whom = f"rank {self.ranks[peer]}"
        action = f"{name} {what}".rstrip()
        if not tensor.numel():
            return Transfer(tensor, lambda: None)
        side = {"send": "group_dst", "recv": "group_src"}[name]
        try:
            with nccl.posting(self.group):
                work = call(tensor, group=self.group, tag=tag, **{side: self.of_group(peer)})
        except RuntimeError as error:
            raise self._failure(whom, action, error) from error
        return Transfer(tensor, lambda: self._wait(work, tensor, whom, action))

    def exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], action: str) -> None:
        """Give part i of `outgoing` to the rank with index i and take its part into `incoming[i]`, all at once; parts
        without elements are no messages.

        Args:
            action: what it is for; in errors.
        """
        self._not_rehearsing()
        operations = [
            dist.P2POp(call, tensor, group=self.group, tag=FIRST_INNER_TAG, group_peer=self.of_group(peer))
            for peer in range(self.size)
            if peer != self.index
            for call, tensor in ((dist.irecv, incoming[peer]), (dist.isend, outgoing[peer]))
            if tensor.numel()
        ]
        if not operations:
            return
        try:
            with nccl.posting(self.group):
                works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self._failure("its peers", action, error) from error
        # Backends that coalesce give one work for all.
        for number, work in enumerate(works):
            peers = operations if len(works) == 1 else operations[number : number + 1]
            ascending = sorted(self.ranks)
            ranks = sorted({ascending[operation.group_peer] for operation in peers})
            self._wait(work, peers[0].tensor, f"rank {', '.join(map(str, ranks))}", action)
        self.traffic.received_bytes += sum(_bytes(part) for peer, part in enumerate(incoming) if peer != self.index)

    def _not_rehearsing(self) -> None:
        assert self.size == 1 or not self.is_rehearsing, "nothing is sent while a rank computes alone"

    def _finish(self, call: Callable[[], Any], action: str, tensor: Tensor | None = None) -> None:
        self._begin(call, action, tensor)()

    def _begin(self, call: Callable[[], Any], action: str, tensor: Tensor | None) -> Callable[[], None]:
        """What waits for it."""
        self._not_rehearsing()
        others = [rank for place, rank in enumerate(self.ranks) if place != self.index]
        whom = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
        size = "" if tensor is None else f" of {_bytes(tensor)} bytes"
        try:
            with nccl.posting(self.group):
                work = call()
        except RuntimeError as error:
            raise self._failure(whom, action, error) from error
        return lambda: self._wait(work, tensor, whom, action + size)

    def _wait(self, work: Any, tensor: Tensor | None, whom: str, action: str) -> None:
        try:
            with self.waiting_for(f"{whom} ({self.axis} {action})"):
                through = nccl.wait(work, tensor, self.timeout_s)
        except RuntimeError as error:
            raise self._failure(whom, action, error) from error
        if not through:
            raise self._failure(whom, action, None)

    def _failure(self, whom: str, action: str, error: RuntimeError | None) -> RunError:
        return RunError(
            f"{self.axis}: rank {self.ranks[self.index]} expected {whom} to take part in {action} within "
            f"{self.timeout_s:g} s, found: {why_not_through(error, self.timeout_s)}"
        )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize
