"""Generation as the leader has it: requests dealt to the instances of a role, samples gathered as they are finished."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from plait.data.records import Sample
from plait.engines import Traits
from plait.generation.request import Request
from plait.policy.decode_ring import StageUse
from plait.policy.step import Key
from plait.schedule.work import MOVED_ON, Done
from plait.speculation.counts import Counts
from plait.workers.announcer import Announcer
from plait.workers.dealing import Dealer, Outstanding
from plait.workers.gathering import Gathering
from plait.workers.lockstep_engine import Halt, LockstepEngine
from plait.workers.messages import (
    Do,
    Message,
    pack_requests,
    unpack_said,
    unpack_samples,
    unpack_speculation,
)
from plait.workers.ranks import LEADER
from plait.workers.remote_moves import RemoteMoves

POLL_S = 0.05
"""An engine's step waits so long for samples of other ranks, where its own has nothing to do."""


class RemoteEngine:
    """`engines.GenerationEngine` for the leader, over the instances of a role.

    Requests are dealt out when the next step begins (`dealing.Dealer`). Instances at work take them with one of their
    next steps.
    """

    def __init__(self, announcer: Announcer, role: str) -> None:
        self._announcer = announcer
        self._role = role
        rank_state = announcer.rank_state
        self._instances = rank_state.places[role].generate
        part = rank_state.roles.get(role)
        self._engine = part.engine if part is not None else None
        """The leader's own; None: it has none."""
        self.model = None if self._engine is None else self._engine.model
        """The leader's part."""
        self._own: tuple[LockstepEngine, int] | None = None
        """The leader's place in its own instance, and the number of that; None: it is in none."""
        place = next((i for i, layout in enumerate(self._instances) if LEADER in layout.mesh.ranks), None)
        if part is not None and part.engine is not None and part.instance is not None:
            assert place is not None, f"the leader has an engine of {role} and is in none of its instances"
            self._own = LockstepEngine(part.engine, part.instance, part.mover), place
        self._sources = {layout.mesh.ranks[0]: i for i, layout in enumerate(self._instances) if i != place}
        """Rank that delivers samples → its instance, of those that the leader has no part in."""
        self._dealer = Dealer(len(self._instances))
        self._outstanding = Outstanding()
        self.said: dict[Key, int] = {}
        """See GenerationEngine: as of each instance's last message, the leader's own as of now."""
        self._speculation: dict[int, Counts] = {}
        """By the rank that delivers samples, as of its last ones."""
        self.moves: RemoteMoves | None = None
        if rank_state.moves_samples and len(self._instances) > 1:
            self.moves = RemoteMoves(
                len(self._instances), self._outstanding, self._tell_of_move, gathers=rank_state.fuses
            )
        self.traits = Traits(len(self._instances), bool(rank_state.held_copies[role]), rank_state.keeps_all)
        self.policy_version = 0

    @property
    def not_compiled(self) -> str | None:
        """What the leader's own part does not compile, and why."""
        return None if self._engine is None else self._engine.not_compiled

    @property
    def speculation(self) -> Counts | None:
        """Counts of all instances, as far as they have told them with their samples."""
        own = None if self._engine is None else self._engine.speculation
        counts = [*self._speculation.values(), *([] if own is None else [own])]
        return sum(counts, Counts()) if counts else None

    def take_use(self) -> StageUse | None:
        """See `LockstepEngine.take_use`, of the leader in its own instance; None: it is in none."""
        return None if self._own is None else self._own[0].take_use()

    @property
    def has_work(self) -> bool:
        out = self._outstanding
        return bool(out.pending or out.where or (self.moves is not None and self.moves.is_moving))

    @property
    def running(self) -> tuple[int, ...]:
        return self._outstanding.running(len(self._instances))

    @property
    def at_work(self) -> frozenset[int]:
        """Ranks of the instances that have samples, or are about to get or to give some."""
        places = {*self._outstanding.where.values(), *(self.moves.instances if self.moves is not None else ())}
        if self._outstanding.pending:
            places = {*range(len(self._instances))}
        elif self._works and self._own is not None:
            places.add(self._own[1])
        return frozenset(rank for place in places for rank in self._instances[place].mesh.ranks)

    @property
    def ready(self) -> bool:
        """Whether `advance` would do something at once."""
        if self._may_deal or self._works:
            return True
        waited = self._waited
        return any(self._announcer.transport.has(source, number) for source in self._sources for number in waited)

    @property
    def _waited(self) -> set[int]:
        """Commands that others are to answer."""
        return {*self._outstanding.numbers.values(), *(self.moves.numbers if self.moves is not None else ())}

    @property
    def _works(self) -> bool:
        """Whether the leader's own instance has something in flight, or is about to."""
        return self._own is not None and (self._own[0].has_heard or not self._own[0].is_empty)

    @property
    def _may_deal(self) -> bool:
        """Weights are moved only to instances that have nothing in flight."""
        out = self._outstanding
        return bool(out.pending) and (not out.where or self._announcer.is_fresh(self._role, "decode"))

    def add(self, request: Request) -> None:
        self._outstanding.pending.append(request)

    def advance(self, call: str) -> tuple[Done, list[Sample]]:
        """One step of the leader's own instance, and what others have finished meanwhile; where that is nothing, it
        waits for them, but not for long. What the leader's own instance did is an action of the call."""
        assert self.has_work, "step without work"
        with self._announcer.status.doing(f"{self._role}.generate"):
            worked, finished = self._step()
        done = MOVED_ON if not worked or self._own is None else self._own[0].last_done(call)
        return replace(done, units=len(finished)), finished

    def _step(self) -> tuple[bool, list[Sample]]:
        """Whether the leader's own instance worked, and the samples that are finished."""
        if self._may_deal:
            self._deal()
        finished: list[Sample] = []
        if works := self._works:
            finished += self._own_step()
            self._announcer.status.tick()
        finished += self._delivered(0.0 if works else POLL_S)
        for sample in finished:
            key = sample.prompt.uid, sample.index
            self.said.pop(key, None)
            self._dealer.delivered(sample, self._outstanding.where.pop(key))
        if self.moves is not None:
            self.moves.go_on()
        if not self.has_work:
            self.said.clear()
            self._outstanding.forget_prompts()
            if self.moves is not None:
                self.moves.forget()
        return works, finished

    def _delivered(self, wait_s: float) -> list[Sample]:
        """What other instances have finished; where it is nothing, so long is waited for it."""
        finished: list[Sample] = []
        while self._sources and (
            heard := self._announcer.transport.poll(
                list(self._sources), wait_s, f"{self._role}.generate", answers=self._waited
            )
        ):
            source, answer = heard
            if self.moves is not None and (number := answer.header["answers"]) in self.moves.numbers:
                self.moves.heard(number, self._sources[source], answer)
            else:
                finished += unpack_samples(answer, self._outstanding.prompts)
                self.said |= {key: n for key, n in unpack_said(answer).items() if key in self._outstanding.where}
                if (counts := unpack_speculation(answer)) is not None:
                    self._speculation[source] = counts
            wait_s = 0.0
            if not self.has_work:
                break
        return finished

    def _own_step(self) -> list[Sample]:
        """A step of the leader's instance, in lockstep with the other ranks of it, if there are any."""
        assert self._own is not None, "the leader's instance has no engine"
        lockstep, place = self._own
        joining = self._announcer.joining(f"{self._role}.generate") if lockstep.is_joint else nullcontext()
        with joining:
            finished = lockstep.step(_nothing_to_wait_for)
        for number, answer in lockstep.told:
            assert self.moves is not None, f"instance {place} has samples move, and none may"
            self.moves.heard(number, place, answer)
        lockstep.told.clear()
        self.said |= lockstep.said
        return [sample for samples in finished.values() for sample in samples]

    def _deal(self) -> None:
        announcer, out = self._announcer, self._outstanding
        needed = announcer.rank_state.copies_for(self._role, "decode")
        announcer.sync_weights(self._role, "decode")
        for place, requests in self._dealer.deal(out.pending):
            message = Message({"do": Do.GENERATE, "role": self._role, "requests": pack_requests(requests)})
            number = announcer.tell(self._instances[place].mesh.ranks, message, needed)
            out.dealt(requests, place, number)
            if self._own is not None and place == self._own[1]:
                announcer.rank_state.offloads.want((self._role, "decode"))
                self._own[0].hear(number, requests)
        out.pending.clear()

    def halt(self, *, parks: bool) -> None:
        """See GenerationEngine."""
        self._outstanding.pending.clear()
        if not self._outstanding.where:
            return
        number = self._tell_those_at_work({"do": Do.HALT, "role": self._role, "parks": parks})
        if self._works and self._own is not None:
            self._own[0].hear(number, Halt(parks))

    def give_up(self) -> None:
        """Nobody waits for the samples any longer: they are forgotten."""
        if not self.has_work:
            return
        self._outstanding.pending.clear()
        number = self._tell_those_at_work({"do": Do.FORGET, "role": self._role, "call": None})
        if self._works and self._own is not None:
            self._own[0].hear(number, None)
            self._own_step()
        self._outstanding.where.clear()
        self._outstanding.forget_prompts()
        self.said.clear()
        if self.moves is not None:
            self.moves.forget()

    def _tell_those_at_work(self, header: dict[str, Any]) -> int:
        at_work = self.at_work
        ranks = [rank for layout in self._instances for rank in layout.mesh.ranks if rank in at_work]
        return self._announcer.tell(ranks, Message(header), None)

    def _tell_of_move(self, stage: Gathering) -> int:
        """The instances that a stage of a move concerns are told to do it; the number of the command."""
        ranks = {rank for place in stage.concerned for rank in self._instances[place].mesh.ranks}
        number = self._announcer.tell(ranks, stage.to_message(self._role), None)
        if self._own is not None and self._own[1] in stage.concerned:
            self._announcer.rank_state.offloads.want((self._role, "decode"))
            self._own[0].hear(number, stage)
        return number

    def update_weights(self, version: int) -> None:
        """The role's weights have changed: bring them to the instances; later samples are stamped with `version`."""
        assert not self.has_work, "weights change only while no sample is in flight"
        self._announcer.sync_weights(self._role)
        ranks = [rank for layout in self._instances for rank in layout.mesh.ranks]
        self._announcer.tell(ranks, Message({"do": Do.VERSION, "role": self._role, "version": version}), None)
        if self._engine is not None:
            self._engine.update_weights(version)
        self.policy_version = version


def _nothing_to_wait_for() -> None:
    raise AssertionError("the leader is told nothing that it has not said itself")
