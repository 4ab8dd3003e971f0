"""Unfinished samples of a role that go on in other instances: what each rank does.

All ranks of both instances do it at a boundary between two of their steps, in the order in which the leader lists the
pairs, so that nobody waits for a rank that waits for somebody else.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.generation.engine import Engine
from plait.layout.mesh import Layout
from plait.models.parallel.team import Peers
from plait.policy.step import Key
from plait.schedule.work import to_the_end
from plait.workers.gathering import Gathering
from plait.workers.sample_mover import End, SampleMover


class SampleMoverOfRank:
    """Does this rank's part of gatherings.

    Args:
        instances: of the role that generates, in the order of their numbers.
        engine: of this rank, in its instance.
        peers: all ranks of all instances.
    """

    def __init__(self, instances: Sequence[Layout], engine: Engine, peers: Peers) -> None:
        self._instances = tuple(instances)
        self._engine = engine
        self._peers = peers
        self._rank = peers.ranks[peers.index]
        self.place = next(i for i, one in enumerate(instances) if self._rank in one.mesh.ranks)
        """The number of this rank's instance."""

    def gather(self, gathering: Gathering) -> list[Key]:
        """Do it; the samples that this rank's instance has given away. Those that had ended, or had not begun, stay.

        Raises:
            RunError: a rank of the other instance is gone, or did not come in time.
        """
        left: list[Key] = []
        for (source, target), keys in sorted(gathering.pairs.items()):
            if self.place not in (source, target):
                continue
            ends = (End(self._instances[k], self._engine if k == self.place else None) for k in (source, target))
            mover = SampleMover(self._peers, *ends, kv="keep")
            moved = to_the_end(mover.moving(keys))
            left += moved.keys if self.place == source else ()
        return left
