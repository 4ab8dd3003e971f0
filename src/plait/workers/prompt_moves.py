"""Prompts that one instance computes and another draws the samples of: what each rank of both does.

No two instances ever meet at a step: what leaves is sent by threads, while both go on with other work.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from plait.errors import RunError
from plait.generation.engine import Engine
from plait.generation.transfer import Place
from plait.layout.mesh import Layout
from plait.models.parallel.peers import Peers
from plait.policy.prompts_alone import due, is_computed, may_compute
from plait.schedule.work import to_the_end
from plait.workers.gathering import Gathering, Left, MoveWord, Pair, Said, Stage, Through
from plait.workers.sample_mover import End, SampleMover
from plait.workers.sample_offers import Answer, Given


class PromptMoverOfRank:
    """Does this rank's part of gatherings of prompts (`Gathering.is_of_prompts`), each of one pair of instances; and
    follows those that its instance computes for others.

    Args:
        instances: of the role that generates, in the order of their numbers.
        engine: of this rank, in its instance.
        peers: all ranks of all instances.
        deadline_s: seconds in which all that was given has to come.

    Raises:
        ModelError: the model is in parts, and it is not known which heads a rank has.
    """

    def __init__(self, instances: Sequence[Layout], engine: Engine, peers: Peers, *, deadline_s: float) -> None:
        self._instances = tuple(instances)
        self._engine, self._peers, self._deadline_s = engine, peers, deadline_s
        Place.of(engine.model).shape(engine.state.pool)  # before any work
        rank = peers.ranks[peers.index]
        self.place = next(i for i, instance in enumerate(instances) if rank in instance.mesh.ranks)
        """The number of this rank's instance."""
        self._movers: dict[Pair, SampleMover] = {}
        """Those of pairs that this rank is of, with prompts on their way."""
        self._taking: dict[int, tuple[Pair, float]] = {}
        """Command to take prompts → the pair, and when that began, until they have come."""
        self._under_way: set[Pair] = set()
        """Pairs whose prompts this rank gives or takes, until their samples may begin."""
        self._told: set[int] = set()
        """Prompts that were said to be computed, or to be so with the next step, and are still here."""
        self.received_bytes = 0
        """Keys and values that came to the rank by the last `Stage.ENTER`."""

    @property
    def is_under_way(self) -> bool:
        """Whether prompts are on their way to the instance, or from it; all its ranks say so after the same step."""
        return bool(self._under_way)

    @property
    def may_step(self) -> bool:
        """Whether an engine with work has something to do before a prompt is taken out of it."""
        scheduler = self._engine.state.scheduler
        return scheduler.limits.starts or may_compute(scheduler.sequences, scheduler.room)

    def do(self, number: int, gathering: Gathering) -> MoveWord | None:
        """Do this rank's part of a stage, by the command of this number; what its instance tells the leader of it.

        Raises:
            RunError: a rank of the other instance is gone, or did not come in time.
        """
        [(pair, keys)] = gathering.pairs.items()
        is_source = pair[0] == self.place
        if self.place not in gathering.concerned:
            return None
        if pair not in self._movers:
            ends = (End(self._instances[k], self._engine if k == self.place else None) for k in pair)
            self._movers[pair] = SampleMover(self._peers, *ends, kv="keep")
        mover = self._movers[pair]
        move = gathering.move * len(self._instances) ** 2 + pair[0] * len(self._instances) + pair[1]
        match gathering.stage:
            case Stage.HERE:
                return Said(gathering.stage, {pair: mover.here(gathering.prompts).to_message()})
            case Stage.GIVE:
                given = mover.give(keys, Answer.of(gathering.said[pair]), move)
                self._told -= {uid for uid, _ in keys}
                self._under_way.add(pair)
                return Said(gathering.stage, {pair: given.to_message()})
            case Stage.TAKE:
                mover.take(Given.of(gathering.said[pair]), move)
                self._taking[number] = pair, time.monotonic()
                self._under_way.add(pair)
                return None
            case Stage.ENTER:
                report = mover.enter()
                self.received_bytes = 0 if report is None else sum(report.received.values())
                self._under_way.discard(pair)
                del self._movers[pair]
                return None
            case Stage.REST:
                moved = to_the_end(mover.moving(keys))
                self.received_bytes = sum(moved.report.received.values())
                self._told -= {uid for uid, _ in keys}
                del self._movers[pair]
                return Left(moved.keys) if is_source else None

    def news(self, wait_s: float) -> list[tuple[int, Through]]:
        """Look after what is on its way: number of a command to take prompts → they have come.

        Args:
            wait_s: seconds to wait for that, where something is on its way.

        Raises:
            RunError: what was given is not there in time, or a rank of the other instance is gone.
        """
        until_s = time.monotonic() + wait_s
        left_s = lambda: max(0.0, until_s - time.monotonic())
        through = {pair for pair in sorted(self._under_way) if self._movers[pair].wait(left_s())}
        numbers = [number for number, (pair, _) in self._taking.items() if pair in through]
        for number, (pair, began_s) in self._taking.items():
            if pair not in through and time.monotonic() - began_s > self._deadline_s:
                ranks = ", ".join(map(str, self._instances[pair[0]].mesh.ranks))
                raise RunError(
                    f"prompts {number}: expected keys and values of rank {ranks} within {self._deadline_s:g} s "
                    "(`stalled_after_s`), and they have not come"
                )
        for number in numbers:
            del self._taking[number]
        if through and not numbers:  # only the other instance has something to do
            time.sleep(left_s())
        return [(number, Through()) for number in numbers]

    def due(self) -> list[int]:
        """Prompts for others that the next step will have computed; each is said once, here or by `computed`."""
        scheduler = self._engine.state.scheduler
        if scheduler.limits.starts:
            return []
        return self._new(due(scheduler.sequences, scheduler.room, scheduler.limits.max_prefill_tokens))

    def computed(self) -> list[int]:
        """Prompts for others that are computed; each is said once, here or by `due`."""
        scheduler = self._engine.state.scheduler
        if scheduler.limits.starts:
            return []
        return self._new(uid for uid, prompt in scheduler.sequences.prompts.items() if is_computed(prompt))

    def _new(self, uids: Iterable[int]) -> list[int]:
        """Those that were not said yet."""
        new = [uid for uid in uids if uid not in self._told]
        self._told |= set(new)
        return new

    def forget(self) -> None:
        """Nobody waits any longer for what is on its way."""
        self._movers.clear()
        self._taking.clear()
        self._under_way.clear()
        self._told.clear()
