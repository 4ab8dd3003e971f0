"""Devices, slices of them, and how a model is spread over a slice.

Global ranks number the devices of a cluster, node by node. Ranks from `num_devices` on are *stores*: files, which hold
bytes and give or take them, but run nothing; each is a node of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from plait.errors import LayoutError


@dataclass(frozen=True)
class Cluster:
    """`nodes` equal nodes of `devices` each. Raises LayoutError where there are none."""

    nodes: int
    devices: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.devices < 1:
            raise LayoutError(f"cluster: expected at least one node of one device, found {self.nodes} x {self.devices}")

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices

    def node_of(self, rank: int) -> int:
        """The node of a device; of a store, a number behind the nodes."""
        return self.nodes + rank - self.num_devices if self.is_store(rank) else rank // self.devices

    def is_store(self, rank: int) -> bool:
        return rank >= self.num_devices

    def store(self, index: int) -> int:
        """The rank of the store with this index."""
        return self.num_devices + index

    def is_legal_size(self, size: int) -> bool:
        """Whether some legal mesh, or pipeline stage, has this many devices."""
        power = size & (size - 1) == 0
        return size % self.devices == 0 or (power and size < self.devices and self.devices % size == 0)

    def legal_meshes(self, smallest: int = 1) -> Iterator[Mesh]:
        """2^k adjacent devices inside a node, aligned, or whole adjacent nodes; `smallest` devices at least."""
        size = 1
        while size < self.devices:
            if size >= smallest and self.devices % size == 0:
                yield from (Mesh(tuple(range(at, at + size))) for at in range(0, self.num_devices, size))
            size *= 2
        for count in range(1, self.nodes + 1):
            if count * self.devices >= smallest:
                for first in range(self.nodes - count + 1):
                    yield Mesh(tuple(range(first * self.devices, (first + count) * self.devices)))


@dataclass(frozen=True)
class Mesh:
    """Distinct global ranks, in the order dp, pp, tp: tp varies fastest. Raises LayoutError where they are none."""

    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ranks:
            raise LayoutError("ranks: expected at least one rank, found none")
        if len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise LayoutError(f"ranks: expected distinct ranks from 0 on, found {list(self.ranks)}")

    def __len__(self) -> int:
        return len(self.ranks)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept: what is known of a layout is looked up by its mesh, which may have a thousand ranks."""
        return hash(self.ranks)


@dataclass(frozen=True)
class Parallelism:
    """`stages` are the layers of each pipeline stage; empty: as equal as they can be.

    Raises:
        LayoutError: a number is below 1, or `stages` are not `pp`.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    stages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for key, value in (("dp", self.dp), ("tp", self.tp), ("pp", self.pp)):
            if value < 1:
                raise LayoutError(f"{key}: expected at least 1, found {value}")
        if self.stages and len(self.stages) != self.pp:
            raise LayoutError(f"stages: expected the layers of each of {self.pp} stages, found {list(self.stages)}")
        if any(layers < 1 for layers in self.stages):
            raise LayoutError(f"stages: expected at least one layer in each, found {list(self.stages)}")

    @property
    def size(self) -> int:
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        return f"dp{self.dp} tp{self.tp} pp{self.pp}"

    @classmethod
    def all_of(cls, size: int) -> Iterator[Parallelism]:
        """Every (dp, tp, pp) whose product is `size`."""
        divisors = [number for number in range(1, size + 1) if size % number == 0]
        for tp, pp in product(divisors, repeat=2):
            if size % (tp * pp) == 0:
                yield cls(size // (tp * pp), tp, pp)


@dataclass(frozen=True)
class Coordinates:
    """Place of a rank in its layout."""

    dp: int
    tp: int
    pp: int


@dataclass(frozen=True)
class Layout:
    """A mesh and a parallelism: which rank has which coordinates.

    shards_weights: ranks of dp hold shares of what one rank of a copy holds (ZeRO-3), and not all of it; dp is above 1

    Raises:
        LayoutError: the mesh has not dp * tp * pp ranks.
    """

    mesh: Mesh
    parallelism: Parallelism
    shards_weights: bool = False

    def __post_init__(self) -> None:
        assert not self.shards_weights or self.parallelism.dp > 1, "one copy has no ranks to share its weights with"
        if len(self.mesh) != self.parallelism.size:
            raise LayoutError(
                f"ranks: expected dp * tp * pp = {self.parallelism.size} ranks for {self.parallelism}, "
                f"found {len(self.mesh)}; change dp, tp, pp or ranks"
            )

    @classmethod
    def on(cls, ranks: range | tuple[int, ...], dp: int = 1, tp: int = 1, pp: int = 1) -> Layout:
        """A layout in one line: `Layout.on(range(8), dp=2, tp=4)`."""
        return cls(Mesh(tuple(ranks)), Parallelism(dp, tp, pp))

    def __str__(self) -> str:
        ranks = self.mesh.ranks
        plain = ranks == tuple(range(ranks[0], ranks[0] + len(ranks)))
        shares = ", weights sharded" if self.shards_weights else ""
        return f"{self.parallelism} on {f'{ranks[0]}-{ranks[-1]}' if plain else ','.join(map(str, ranks))}{shares}"

    @property
    def whole(self) -> Layout:
        """The same layout without sharded weights: each copy of a model has all of its weights."""
        return Layout(self.mesh, self.parallelism) if self.shards_weights else self

    def rank_at(self, dp: int, tp: int, pp: int) -> int:
        sizes = self.parallelism
        return self.mesh.ranks[(dp * sizes.pp + pp) * sizes.tp + tp]

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank of the mesh stands along dp, tp and pp."""
        return self._coordinates[rank]

    @cached_property
    def _coordinates(self) -> dict[int, Coordinates]:
        sizes = self.parallelism
        places = product(range(sizes.dp), range(sizes.pp), range(sizes.tp))
        return {rank: Coordinates(dp, tp, pp) for rank, (dp, pp, tp) in zip(self.mesh.ranks, places, strict=True)}

    def instances(self) -> tuple[Layout, ...]:
        """The dp copies of the model, each a layout of its own (dp 1)."""
        return self._instances

    def instance_of(self, rank: int) -> Layout:
        """The copy of the model that a rank of the mesh has a part in."""
        return self._instances[self._coordinates[rank].dp]

    @cached_property
    def _instances(self) -> tuple[Layout, ...]:
        size = self.parallelism.tp * self.parallelism.pp
        instance = Parallelism(1, self.parallelism.tp, self.parallelism.pp, self.parallelism.stages)
        ranks = self.mesh.ranks
        return tuple(Layout(Mesh(ranks[at : at + size]), instance) for at in range(0, len(ranks), size))
