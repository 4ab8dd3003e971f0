"""Which ranks of layouts tell each other what: the process groups that a run makes of them, one rule for the run and
for what is forecast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from plait.layout.mesh import Layout

NAMES = ("all", "tp", "dp", "pp", "ends")
"""Names of axes: see `models.parallel.team.Team`."""
SENDING = "pp"
"""The axis whose ranks send each other messages."""
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
        return self.name == SENDING

    @property
    def group(self) -> tuple[bool, tuple[int, ...]]:
        return self.sends, self.ranks


def peers_of(layout: Layout, *, apart: bool = False) -> dict[str, NDArray[np.int64]]:
    """Name of an axis → [groups, ranks] the peers of a layout, in the order of the axis.

    Args:
        apart: each of its copies of a model by itself, as instances are.
    """
    sizes = layout.parallelism
    ranks_DPT = np.array(layout.mesh.ranks).reshape(sizes.dp, sizes.pp, sizes.tp)
    stages = ranks_DPT.transpose(0, 2, 1).reshape(-1, sizes.pp)
    return {
        "all": ranks_DPT.reshape(sizes.dp if apart else 1, -1),
        "tp": ranks_DPT.reshape(-1, sizes.tp),
        "dp": ranks_DPT.reshape(-1, 1) if apart else ranks_DPT.transpose(1, 2, 0).reshape(-1, sizes.dp),
        "pp": stages,
        "ends": stages[:, [0, -1]] if sizes.pp > 1 else stages[:0],
    }


def axes(layout: Layout) -> Iterator[Axis]:
    """Every set of peers of a layout, in an order that all ranks share."""
    groups = {name: list(map(tuple, of_name.tolist())) for name, of_name in peers_of(layout).items()}
    yield from (Axis(name, ranks) for name in ("all", "tp", "dp") for ranks in groups[name])
    for stages, ends in zip_longest(groups["pp"], groups["ends"]):
        yield Axis("pp", stages)
        if ends is not None:
            yield Axis("ends", ends)


@lru_cache(maxsize=4096)
def all_of(layouts: tuple[Layout, ...]) -> Layout:
    """All ranks of layouts whose instances send each other samples."""
    ranks = sorted(rank for layout in layouts for rank in layout.mesh.ranks)
    return Layout.on(tuple(ranks), dp=len(ranks))
