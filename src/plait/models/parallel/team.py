"""The ranks that hold one model together, and what they tell each other.

A team is one layout on running processes: along each axis (dp, tp, pp) a rank has peers. Peers of one rank need no
process group and send nothing, so the code of many devices is the code of one.

All ranks of an axis must call the same collectives in the same order. Messages between two ranks meet by their tag on
gloo, and in the order of posting on NCCL.

    teams = make_teams([training, scoring], rank, timeout_s=600.0)    # every rank of the world, the same list
    team = teams[training]                                            # None: this rank is no member
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from plait.layout.groups import axes
from plait.layout.mesh import Coordinates, Layout
from plait.models.parallel import nccl
from plait.models.parallel.peers import TIMEOUT_S, Peers
from plait.models.parallel.transfer import WaitingFor


@dataclass(frozen=True, eq=False)
class Team:
    """A layout on running processes, as one of its ranks sees it."""

    layout: Layout
    rank: int
    """Global rank of this process."""
    dp: Peers
    """Ranks with the same part of the model and other rows."""
    tp: Peers
    """Ranks that share each layer of this stage."""
    pp: Peers
    """The stages of this rank's pipeline, in order."""
    ends: Peers
    """The first and the last stage of this pipeline, which both hold a tied embedding; on the stages between them, and
    where there is one stage, this rank alone."""
    all: Peers
    """Every rank of the layout."""
    splits_tokens: bool = False
    """Whether ranks of tp have some of the tokens each between layers, while a model is trained (`token_split`)."""

    @classmethod
    def alone(cls, rank: int = 0) -> Team:
        """A team of one, without torch.distributed."""
        return cls(Layout.on((rank,)), rank, *(Peers.alone(rank, axis) for axis in ("dp", "tp", "pp", "ends", "all")))

    @property
    def received_bytes(self) -> int:
        """Bytes of weights, gradients and activations that came, so far. What ranks tell `all` about a step (losses,
        norms, tokens that were drawn) is not counted.
        """
        return sum(axis.traffic.received_bytes for axis in (self.dp, self.tp, self.pp, self.ends))

    @property
    def coordinates(self) -> Coordinates:
        return self.layout.coordinates(self.rank)

    @property
    def is_first_stage(self) -> bool:
        return self.pp.index == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp.index == self.pp.size - 1


def make_teams(
    layouts: Iterable[Layout],
    rank: int,
    *,
    timeout_s: float = TIMEOUT_S,
    waiting_for: WaitingFor = nullcontext,
    splitting: Collection[Layout] = (),
) -> dict[Layout, Team | None]:
    """The teams of some layouts. Every rank of the default process group must call this with the same layouts.

    Args:
        layouts: their ranks are global ranks; where all have one rank, no process group is needed.
        rank: of this process.
        timeout_s: of each wait for peers.
        waiting_for: told what each wait is for.
        splitting: layouts whose ranks of tp part the tokens between layers.

    Returns:
        Layout → its team, None where this rank is no member.
    """
    made: dict[tuple[bool, tuple[int, ...]], Any] = {}
    teams: dict[Layout, Team | None] = {}
    for layout in layouts:
        peers: dict[str, Peers] = {}
        for axis in axes(layout):
            ranks, group = axis.ranks, axis.group
            if len(ranks) > 1 and group not in made:
                made[group] = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
                if rank in ranks:
                    nccl.connect(made[group], ranks, rank, pairs=axis.sends)
            if rank in ranks:
                peers[axis.name] = Peers(ranks, ranks.index(rank), axis.name, made.get(group), timeout_s, waiting_for)
        if rank in layout.mesh.ranks:
            peers.setdefault("ends", Peers.alone(rank, "ends"))
            teams[layout] = Team(layout, rank, **peers, splits_tokens=layout in splitting)
        else:
            teams[layout] = None
    return teams
