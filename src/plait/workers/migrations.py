"""Unfinished samples of a role that go on in other instances: what each rank does.

What goes ahead is begun by each instance at a boundary of its own steps, and nobody waits. For the rest all ranks of
both instances meet at a boundary between two of their steps, in the order in which the leader lists the pairs, so that
nobody waits for a rank that waits for somebody else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from plait.generation.engine import Engine
from plait.layout.mesh import Layout
from plait.models.parallel import nccl
from plait.models.parallel.peers import Peers
from plait.policy.step import Key
from plait.schedule.work import to_the_end
from plait.workers.gathering import Gathering, Left, MoveWord, Pair, Said, Stage
from plait.workers.messages import Message
from plait.workers.sample_mover import End, SampleMover
from plait.workers.sample_offers import Answer, Given


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
        self._ahead: dict[Pair, SampleMover] = {}
        """Those of the move whose bulk goes ahead."""
        self.place = next(i for i, instance in enumerate(instances) if self._rank in instance.mesh.ranks)
        """The number of this rank's instance."""
        self.received_bytes = 0
        """Keys and values that came to the rank by the last move."""
        self._connect()

    def _connect(self) -> None:
        """Send a number to each rank of the other instances and get one of it; every rank does so at once. Else what
        first goes ahead would stand still at its source until the target is told, and with it all else of the group."""
        if not self._peers.in_order:
            return
        number = torch.zeros(2, device=nccl.device())
        others = [rank not in self._instances[self.place].mesh.ranks for rank in self._peers.ranks]
        outgoing, incoming = ([half[: int(is_other)] for is_other in others] for half in number.split(1))
        self._peers.exchange(outgoing, incoming, "connections of instances")

    @property
    def is_through(self) -> bool:
        """Whether all that the rank has given ahead is on the other side."""
        return all(mover.is_through for (source, _), mover in self._ahead.items() if source == self.place)

    def do(self, gathering: Gathering) -> MoveWord | None:
        """Do this rank's part of a stage; what its instance tells the leader of it.

        Raises:
            RunError: a rank of the other instance is gone, or did not come in time.
            ModelError: the model is in parts, and it is not known which heads a rank has.
        """
        if self.place not in gathering.concerned:
            return None
        match gathering.stage:
            case Stage.HERE:
                self._ahead = {pair: mover for pair, mover in self._ahead.items() if pair[1] != self.place}
                return Said(gathering.stage, self._of_pairs(gathering, 1, self._here))
            case Stage.GIVE:
                self._ahead = {pair: mover for pair, mover in self._ahead.items() if pair[0] != self.place}
                return Said(gathering.stage, self._of_pairs(gathering, 0, self._give))
            case Stage.TAKE:
                for pair in self._pairs(gathering, 1):
                    self._take(gathering, pair)
                return None
            case Stage.REST:
                given_away = self._rest(gathering)
                return Left(given_away) if self.place in gathering.sources else None

    def _pairs(self, gathering: Gathering, side: int) -> list[Pair]:
        """On whose source side (0) or target side (1) this rank is."""
        return [pair for pair in sorted(gathering.pairs) if pair[side] == self.place]

    def _of_pairs(
        self, gathering: Gathering, side: int, do: Callable[[Gathering, Pair], Message]
    ) -> dict[Pair, Message]:
        return {pair: do(gathering, pair) for pair in self._pairs(gathering, side)}

    def _here(self, gathering: Gathering, pair: Pair) -> Message:
        uids = {uid for uid, _ in gathering.pairs[pair]}
        return self._mover(pair).here([prompt for prompt in gathering.prompts if prompt.uid in uids]).to_message()

    def _give(self, gathering: Gathering, pair: Pair) -> Message:
        keys = [key for key in gathering.pairs[pair] if key not in gathering.recompute]
        answer = Answer.of(gathering.said[pair])
        return self._mover(pair).give(keys, answer, self._number(gathering, pair)).to_message()

    def _take(self, gathering: Gathering, pair: Pair) -> None:
        self._mover(pair).take(Given.of(gathering.said[pair]), self._number(gathering, pair))

    def _number(self, gathering: Gathering, pair: Pair) -> int:
        """The number of what goes ahead of a pair; ranks of different pairs may have messages on their way at once."""
        return gathering.move * len(self._instances) ** 2 + pair[0] * len(self._instances) + pair[1]

    def _rest(self, gathering: Gathering) -> list[Key]:
        """The samples that this rank's instance has given away. Those that had ended, or had not begun, stay."""
        given_away: list[Key] = []
        self.received_bytes = 0
        for pair, keys in sorted(gathering.pairs.items()):
            if self.place in pair:
                moved = to_the_end(self._mover(pair).moving(keys, recompute=gathering.recompute))
                given_away += moved.keys if self.place == pair[0] else ()
                reports = (moved.report, *([] if moved.ahead is None else [moved.ahead]))
                self.received_bytes += sum(sum(report.received.values()) for report in reports)
        self._ahead.clear()
        return given_away

    def _mover(self, pair: Pair) -> SampleMover:
        if pair not in self._ahead:
            ends = (End(self._instances[k], self._engine if k == self.place else None) for k in pair)
            self._ahead[pair] = SampleMover(self._peers, *ends, kv="keep")
        return self._ahead[pair]
