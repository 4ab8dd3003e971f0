"""Clusters: how many devices of what kind, and what connects them.

Nodes may be of several kinds: ranks that wait for each other take as long as the slowest of them (`ClusterSpec.among`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from plait.cost.hardware import DEFAULT, Device, Link, Software, slowest_device, slowest_link
from plait.errors import ConfigError
from plait.layout.mesh import Cluster, Layout


@dataclass(frozen=True)
class Checked:
    """Predictions for a cluster that were held against measured times: of which, in words, and the mean of
    |predicted / measured - 1|."""

    source: str
    error: float


@dataclass(frozen=True)
class NodeKind:
    """So many nodes that follow each other and are alike; links and price as of `ClusterSpec`."""

    nodes: int
    device: Device
    intra: Link
    inter: Link
    host: Link
    price_per_device_hour: float | None = None


@dataclass(frozen=True)
class ClusterSpec:
    """`nodes` nodes of equally many devices.

    intra: between devices of a node, of each device; where `messages` are known apart, of sums
    inter: into or out of a node, shared by its devices
    host:  between a device and its node's memory
    price_per_device_hour: in any currency; None: not stated, or not the same for all
    checked: how wrong predictions with these numbers were; None: not stated
    messages: from one device of a node to another; None: as `intra`
    kinds: of the nodes, in the order of their ranks, where they are not alike: `device` and the links are then the
        slowest of all, with the least memory, so that what asks for no more is right for every rank; empty: all are as
        these say
    """

    nodes: int
    devices_per_node: int
    device: Device
    intra: Link
    inter: Link
    host: Link
    price_per_device_hour: float | None = None
    name: str = ""
    software: Software = DEFAULT
    checked: Checked | None = None
    kinds: tuple[NodeKind, ...] = ()
    messages: Link | None = None

    @classmethod
    def of_kinds(cls, kinds: Sequence[NodeKind], devices_per_node: int, name: str, software: Software) -> ClusterSpec:
        """A cluster of these nodes; kinds that are alike are merged into one."""
        unlike = {replace(kind, nodes=1) for kind in kinds}
        prices = {kind.price_per_device_hour for kind in kinds}
        return cls(
            sum(kind.nodes for kind in kinds),
            devices_per_node,
            slowest_device([kind.device for kind in kinds]),
            slowest_link([kind.intra for kind in kinds]),
            slowest_link([kind.inter for kind in kinds]),
            slowest_link([kind.host for kind in kinds]),
            prices.pop() if len(prices) == 1 else None,
            name,
            software,
            kinds=tuple(kinds) if len(unlike) > 1 else (),
        )

    @property
    def near(self) -> Link:
        """The link of what one device of a node sends to another."""
        return self.messages or self.intra

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def mesh_cluster(self) -> Cluster:
        return Cluster(self.nodes, self.devices_per_node)

    def of_size(self, devices: int) -> ClusterSpec:
        """As many of the same devices: a part of one node, or whole nodes.

        Raises:
            ConfigError: it would be neither.
        """
        per_node = self.devices_per_node
        if devices < 1 or (devices > per_node and devices % per_node):
            raise ConfigError(
                f"`devices` of the cluster `{self.name}`: expected at most {per_node}, the devices of a node, or a "
                f"multiple of it, found {devices}"
            )
        nodes, per_node = max(1, devices // per_node), min(devices, per_node)
        if not self.kinds:
            return replace(self, nodes=nodes, devices_per_node=per_node)
        if nodes > self.nodes:
            raise ConfigError(
                f"`devices` of the cluster `{self.name}`: expected at most {self.num_devices}, as its nodes are of "
                f"several kinds, found {devices}; list more in its file"
            )
        kinds = [self.kinds[number] for number in self._kind_of_node[:nodes]]
        some = [replace(kind, nodes=len(list(same))) for kind, same in groupby(kinds)]
        return replace(self.of_kinds(some, per_node, self.name, self.software), checked=self.checked)

    # Ranks of several kinds

    @cached_property
    def _kind_of_node(self) -> tuple[int, ...]:
        return tuple(number for number, kind in enumerate(self.kinds) for _ in range(kind.nodes))

    @cached_property
    def _among(self) -> dict[frozenset[int], ClusterSpec]:
        """What was asked for, by kinds."""
        return {}

    def kinds_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The kind of each node that these ranks, which follow each other, are on; empty where all nodes are alike."""
        if not self.kinds:
            return ()
        return tuple(self._kind_of_node[node] for node, _ in groupby(rank // self.devices_per_node for rank in ranks))

    def device_of(self, rank: int) -> Device:
        return self.kinds[self._kind_of_node[rank // self.devices_per_node]].device if self.kinds else self.device

    def memory_of(self, rank: int) -> int:
        """Bytes of a rank's device."""
        return self.device_of(rank).memory_bytes

    def among(self, ranks: Iterable[int]) -> ClusterSpec:
        """The cluster as ranks have it that wait for each other: everything as the slowest of them has it."""
        if not self.kinds:
            return self
        kinds = frozenset(self._kind_of_node[rank // self.devices_per_node] for rank in ranks)
        if kinds not in self._among:
            some = self.of_kinds(
                [self.kinds[n] for n in sorted(kinds)], self.devices_per_node, self.name, self.software
            )
            self._among[kinds] = replace(some, nodes=self.nodes, kinds=())
        return self._among[kinds]

    def stages_of(self, layout: Layout) -> tuple[ClusterSpec, ...]:
        """The cluster as the ranks of each pipeline stage have it, of all copies of a model; empty where all stages
        have it alike."""
        if not self.kinds:
            return ()
        sizes, ranks = layout.parallelism, layout.mesh.ranks
        copy = sizes.tp * sizes.pp
        stages = tuple(
            self.among(rank for at in range(stage * sizes.tp, len(ranks), copy) for rank in ranks[at : at + sizes.tp])
            for stage in range(sizes.pp)
        )
        return stages if any(stage != stages[0] for stage in stages) else ()

    def copies_of(self, layout: Layout) -> tuple[tuple[Layout, tuple[int, ...]], ...]:
        """Copies of a model that are unlike each other in the devices of their stages, each with the places of those
        that are as it is; empty where all are alike."""
        if not self.kinds:
            return ()
        alike: dict[tuple[ClusterSpec, ...], list[int]] = {}
        copies = layout.instances()
        for number, copy in enumerate(copies):
            alike.setdefault(self.stages_of(copy) or (self.among(copy.mesh.ranks),), []).append(number)
        return tuple((copies[places[0]], tuple(places)) for places in alike.values()) if len(alike) > 1 else ()

    @property
    def price_per_hour(self) -> float | None:
        """What all devices cost; None: it is not stated of each."""
        if not self.kinds:
            return None if self.price_per_device_hour is None else self.price_per_device_hour * self.num_devices
        prices = [kind.price_per_device_hour for kind in self.kinds]
        if None in prices:
            return None
        counts = [kind.nodes * self.devices_per_node for kind in self.kinds]
        return sum(price * count for price, count in zip(prices, counts, strict=True) if price is not None)
