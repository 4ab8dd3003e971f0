"""What NCCL takes of each GPU for the connections that a plan makes. Torch-free.

A run connects the group of all ranks, and each group that its teams make (`layout.groups`), when it begins: one
communicator each. Stages of a pipeline are connected for messages then, too. Weights that are moved, and samples that
go on in other instances, connect the ranks that send them to those that receive, in a group that is there already. A
group of one rank is none, and groups of gloo take nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from plait.layout.groups import NAMES, NCCL_PEER_CHANNELS, SENDING, peers_of
from plait.layout.mesh import Cluster, Layout
from plait.layout.params import Heads
from plait.models.shape import ModelShape

NCCL_CHANNELS = 24
"""Channels of a communicator over NVLink, taken to be as many as on machines of eight A100 or H100."""
NCCL_CHANNEL_BYTES = (4 << 20) + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16
"""Buffers of a channel's connection by NCCL's defaults: Simple (NCCL_BUFFSIZE), LL128, LL."""
GROUP_BYTES = NCCL_CHANNELS * NCCL_CHANNEL_BYTES
"""What a communicator that has reduced something takes of each of its ranks."""
SENDER_BYTES, RECEIVER_BYTES = NCCL_PEER_CHANNELS * 2 << 20, NCCL_PEER_CHANNELS * 10 << 20
"""Buffers of the channels between two ranks, where messages are sent, and where they come: as many channels as a run
asks for where the user does not (`NCCL_MAX_P2P_NCHANNELS`). NCCL itself takes 32 on an H100: 3.3 GB for all seven
others (NVIDIA/nccl, issue 1685)."""


@dataclass(frozen=True)
class Placing:
    """A layout whose ranks compute together.

    apart:  each of its copies of a model by itself, as instances do
    trains: the role that is trained there; empty: none
    """

    layout: Layout
    apart: bool = False
    trains: str = ""


@dataclass(frozen=True)
class Sending:
    """Weights that go from `senders` to `receivers`, over the group of all ranks; some may be of both."""

    senders: tuple[int, ...]
    receivers: tuple[int, ...]


@dataclass(frozen=True)
class Connected:
    """What is connected in a run of a plan.

    placings: whatever computes, some of it several times perhaps
    sendings: of weights
    sharing:  layouts whose instances send each other samples, over a group of all their ranks
    """

    placings: Collection[Placing] = ()
    sendings: Collection[Sending] = ()
    sharing: Collection[tuple[Layout, ...]] = ()


class Connections:
    """The connections of the ranks of a plan; what was asked for a layout is kept.

    Args:
        cluster: says which ranks are of one machine: messages to others go by the network, and are not counted.
        num_ranks: of the plan.
        heads: role that is trained → its keys' heads. Ranks of tp that share one send each other its gradients, unless
            all of them do.
    """

    def __init__(self, cluster: Cluster, num_ranks: int, heads: Mapping[str, Heads]) -> None:
        self._num_ranks, self._heads = num_ranks, heads
        self._devices = min(cluster.devices, num_ranks)
        self._machines = -(-num_ranks // self._devices)
        self._others = ~np.eye(self._devices, dtype=bool)
        self._numbers: dict[object, int] = {}
        self._rows = cache(self._rows_of)
        self.ways_between = cache(self._ways_between)
        """As `ways_of`, for samples: from each instance of some layouts to each other one."""

    @property
    def usual_bytes(self) -> int:
        """Those of a rank of a plan that is not known yet: groups of all ranks of a layout, along dp and along tp, and
        messages with all others of its machine. A mapper keeps room for it; predictions of other systems have it."""
        return 3 * GROUP_BYTES + (self._devices - 1) * (SENDER_BYTES + RECEIVER_BYTES)

    def num_groups(self, placings: Collection[Placing]) -> NDArray[np.int64]:
        """[ranks] communicators of teams, that of all ranks left out."""
        rows, are_new = self._distinct(placings)
        return (are_new & (rows & _GROUP > 0)).sum(axis=0)

    def group_bytes(self, placings: Collection[Placing]) -> NDArray[np.float64]:
        """[ranks] of what is connected when a run begins, but for the communicator of all ranks; and of messages
        between ranks that share a head of keys."""
        rows, are_new = self._distinct(placings)
        messages = np.where(are_new, rows & _NEAR, 0).sum(axis=0)
        groups = (are_new & (rows & _GROUP > 0)).sum(axis=0)
        return (groups * GROUP_BYTES + messages * (SENDER_BYTES + RECEIVER_BYTES)).astype(np.float64)

    def message_bytes(self, connected: Connected) -> NDArray[np.float64]:
        """[ranks] of what is connected as soon as weights are moved and samples go on elsewhere: behind the reading of
        models."""
        total = np.zeros((self._machines, self._devices))
        for ways in (self.ways_of(connected.sendings), *map(self.ways_between, connected.sharing)):
            total += ways.sum(axis=2) * SENDER_BYTES + ways.sum(axis=1) * RECEIVER_BYTES
        return total.reshape(-1)[: self._num_ranks]

    def ways_of(self, sendings: Collection[Sending]) -> NDArray[np.bool_]:
        """[machines, senders, receivers] that may be connected on each machine, whose ranks are counted from 0 there.
        Receivers hand on to each other what has come (`layout.route`)."""
        ways = np.zeros((self._machines, self._devices, self._devices), bool)
        for sending in sendings:
            receives = self._by_machine(sending.receivers)
            sends = receives | self._by_machine(sending.senders)
            ways |= sends[:, :, None] & receives[:, None, :]
        return ways & self._others

    def _ways_between(self, layouts: tuple[Layout, ...]) -> NDArray[np.bool_]:
        number = np.full(self._machines * self._devices, -1)
        for place, instance in enumerate(instance for layout in layouts for instance in layout.instances()):
            number[list(instance.mesh.ranks)] = place
        number = number.reshape(self._machines, self._devices)
        there, are_other = number >= 0, number[:, :, None] != number[:, None, :]
        return self._others & there[:, :, None] & there[:, None, :] & are_other

    def _by_machine(self, ranks: Sequence[int]) -> NDArray[np.bool_]:
        """[machines, devices] whether a rank is among these."""
        among = np.zeros(self._machines * self._devices, bool)
        among[list(ranks)] = True
        return among.reshape(self._machines, self._devices)

    def _distinct(self, placings: Collection[Placing]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """[rows, ranks] what each rank has, as `_rows_of` numbers it; what of it is there for the first time."""
        none = np.zeros((1, self._num_ranks), np.int64)
        rows = np.sort(np.concatenate([none, *(self._rows(placing) for placing in placings)]), axis=0)
        are_new = rows > 0
        are_new[1:] &= rows[1:] != rows[:-1]
        return rows, are_new

    def _rows_of(self, placing: Placing) -> NDArray[np.int64]:
        """[rows, ranks] the number of a rank's group along each axis; of those that share a key's head in training, a
        number of theirs. In the last bits to how many others of its machine it sends messages. 0: it has none."""
        rows = np.zeros((len(NAMES) + 1, self._num_ranks), np.int64)
        peers = peers_of(placing.layout, apart=placing.apart)
        for row, name in zip(rows, NAMES, strict=False):
            if peers[name].shape[1] > 1:
                sends = name == SENDING
                names = [(sends, ranks.tobytes()) for ranks in peers[name]]
                self._fill(row, peers[name], names, sends=sends, is_group=True)
        if placing.trains in self._heads:
            alike = sharing(tuple(range(placing.layout.parallelism.tp)), self._heads[placing.trains])
            for at in alike:
                names = [(at, ranks.tobytes()) for ranks in peers["tp"]]
                self._fill(rows[-1], peers["tp"][:, at], names, sends=True)
        return rows[rows.any(axis=1)]

    def _fill(
        self,
        row: NDArray[np.int64],
        groups: NDArray[np.int64],
        names: Sequence[object],
        *,
        sends: bool,
        is_group: bool = False,
    ) -> None:
        """
        Args:
            groups: [groups, ranks]; names: of the groups.
        """
        numbers = np.array([self._numbers.setdefault(name, 1 + len(self._numbers)) for name in names])
        machines = groups // self._devices
        near = (machines[:, :, None] == machines[:, None, :]).sum(axis=2) - 1 if sends else 0
        row[groups] = numbers[:, None] * 2 * _GROUP + is_group * _GROUP + near


def heads_of_keys(shapes: Mapping[str, ModelShape]) -> dict[str, Heads]:
    """By the role."""
    return {role: Heads(shape.heads, shape.kv_heads, shared=True) for role, shape in shapes.items()}


_GROUP = 1 << 16
"""More than the ranks of a machine."""
_NEAR = _GROUP - 1


def sharing(ranks: tuple[int, ...], keys: Heads) -> list[tuple[int, ...]]:
    """The ranks of tp that have one head of keys together, where these are several, and not all."""
    together: dict[tuple[int, int], list[int]] = {}
    for index, rank in enumerate(ranks):
        together.setdefault(keys.part_range(index, len(ranks)), []).append(rank)
    return [tuple(same) for same in together.values() if 1 < len(same) < len(ranks)]
