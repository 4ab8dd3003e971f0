"""Which ranks of layouts tell each other what: the process groups that a run makes of them, one rule for the run and
for what is forecast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from plait.layout.mesh import Layout

NAMES = ("all", "tp", "dp", "pp", "ends")
"""Names of axes: see `models.parallel.team.Team`."""
NCCL_PEER_CHANNELS = 8
"""Channels between two ranks that send each other messages, which a run asks for where the user does not
(`NCCL_MAX_P2P_NCHANNELS`)."""


@dataclass(frozen=True)
class Axis:
    """Ranks that tell each other something, in the order of the axis. Several need a process group, which axes with
    the same `group` share."""

    name: str
    ranks: tuple[int, ...]

    @property
    def sends(self) -> bool:
        """Whether ranks of the group send each other messages, each posted alone. Those of a pipeline do not share a
        group with collectives: on NCCL one would wait for the other."""
        return self.name == "pp"

    @property
    def group(self) -> tuple[bool, tuple[int, ...]]:
        return self.sends, self.ranks


def axes(layout: Layout) -> Iterator[Axis]:
    """Every set of peers of a layout, in an order that all ranks share."""
    sizes, at = layout.parallelism, layout.rank_at
    dps, tps, pps = range(sizes.dp), range(sizes.tp), range(sizes.pp)
    yield Axis("all", layout.mesh.ranks)
    yield from (Axis("tp", tuple(at(dp, tp, pp) for tp in tps)) for dp, pp in product(dps, pps))
    yield from (Axis("dp", tuple(at(dp, tp, pp) for dp in dps)) for pp, tp in product(pps, tps))
    for dp, tp in product(dps, tps):
        stages = tuple(at(dp, tp, pp) for pp in pps)
        yield Axis("pp", stages)
        if len(stages) > 1:
            yield Axis("ends", (stages[0], stages[-1]))


@lru_cache(maxsize=4096)
def all_of(layouts: tuple[Layout, ...]) -> Layout:
    """All ranks of layouts whose instances send each other samples."""
    ranks = sorted(rank for layout in layouts for rank in layout.mesh.ranks)
    return Layout.on(tuple(ranks), dp=len(ranks))
