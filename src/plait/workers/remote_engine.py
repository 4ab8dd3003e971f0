"""The leader's engine: deals requests to the instances of a role, and collects samples as they end."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import inf

from plait.data.records import Sample
from plait.engines import Traits
from plait.generation.refused import Refusals
from plait.generation.request import Request
from plait.policy.prompt_pace import PromptRoom
from plait.policy.step import Key
from plait.schedule.work import MOVED_ON, Done
from plait.speculation.counts import Counts
from plait.speculation.pool import most_entries
from plait.workers.announcer import Announcer
from plait.workers.call_messages import Answer, Delivered, Forget, Generate, Halt, InstanceCommand, Migrate, answer_of
from plait.workers.dealing import Dealer, Outstanding
from plait.workers.drawn_texts import DrawnTexts, Untold, drafting_rank
from plait.workers.gathering import Computed, Gathering
from plait.workers.lockstep_engine import LockstepEngine, join_instance
from plait.workers.messages import Message
from plait.workers.ranks import LEADER
from plait.workers.remote_moves import RemoteMoves
from plait.workers.remote_prompts import RemotePrompts
from plait.workers.upkeep import EndTurns, Recall, Version

Heard = tuple[int, int, Answer]
"""(instance, number of a command, its answer)."""
Shares = Mapping[int, Sequence[tuple[int, Request]]]
"""Instance → the requests that it is told, each with the instance that draws its samples."""
POLL_S = 0.05
"""Seconds that a step waits for samples of other ranks, if the leader's own instance has nothing to do."""


class RemoteEngine:
    """`engines.GenerationEngine` for the leader, over the instances of a role.

    Requests are dealt when the next step begins (`dealing.Dealer`); instances at work take them up in one of their next
    steps. Where prompts have instances of their own, these get the requests whose samples have not begun, and those
    that draw get them with what was computed.
    """

    def __init__(self, announcer: Announcer, role: str) -> None:
        self._announcer = announcer
        self._role = role
        rank_state = announcer.rank_state
        place = rank_state.places[role]
        self._instances, num_drawing = place.generate, len(place.drawing)
        role_state = rank_state.roles.get(role)
        self._engine = role_state.engine if role_state is not None else None
        """The leader's own engine; None: it has none."""
        self.model = None if self._engine is None else self._engine.model
        """The leader's part of the model."""
        self._own = join_instance(rank_state, role)
        """The leader as a member of its own instance; None: it is in none."""
        own = next((i for i, layout in enumerate(self._instances) if LEADER in layout.mesh.ranks), None)
        self._own_place = own
        """The number of that instance."""
        self._sources = {layout.mesh.ranks[0]: i for i, layout in enumerate(self._instances) if i != own}
        """Rank that delivers samples → its instance, for instances that the leader has no part in."""
        self._dealer = Dealer(num_drawing)
        self._outstanding = Outstanding()
        self.said: dict[Key, int] = {}
        """See GenerationEngine: as of the last message of each instance; of the leader's own, as of now."""
        self._speculation: dict[int, Counts] = {}
        """Instance → its counts of drafts, as of its last samples."""
        self._untold = Untold(num_drawing, most_entries(rank_state.recipe.sampling.draft_pool_bytes))
        self.moves: RemoteMoves | None = None
        if rank_state.moves_samples and num_drawing > 1:
            self.moves = RemoteMoves(num_drawing, self._outstanding, self._tell_of_move, gathers=rank_state.fuses)
        self._prompts = self._remote_prompts(range(num_drawing, len(self._instances)))
        """None: samples are drawn where their prompts are computed."""
        self.traits = Traits(num_drawing, bool(rank_state.held_copies[role]), rank_state.keeps_all)

    def _remote_prompts(self, places: range) -> RemotePrompts | None:
        if not places:
            return None
        recipe = self._announcer.rank_state.recipe
        sampling, ahead = recipe.sampling, recipe.device != "cuda"
        room = PromptRoom(sampling.max_running, sampling.kv_tokens or inf, sampling.max_prefill_tokens)
        return RemotePrompts(places, self._outstanding, self.said, self._tell_of_move, room, ahead=ahead)

    @property
    def refusals(self) -> Refusals:
        """What the leader's own engine does not do; nothing where there is none."""
        return Refusals() if self._engine is None else self._engine.state.forward.refusals

    @property
    def speculation(self) -> Counts | None:
        """Counts of drafts of all instances, as far as these have told them with their samples."""
        return sum(self._speculation.values(), Counts()) if self._speculation else None

    @property
    def has_work(self) -> bool:
        out = self._outstanding
        return bool(out.pending or out.where or (self.moves is not None and self.moves.is_moving))

    @property
    def running(self) -> tuple[int, ...]:
        return self._outstanding.running(self.traits.num_instances)

    @property
    def at_work(self) -> frozenset[int]:
        """Ranks of the instances that have samples, or are about to get or give some."""
        places = {*self._outstanding.where.values(), *(self.moves.instances if self.moves is not None else ())}
        places |= self._prompts.instances if self._prompts is not None else set()
        if self._outstanding.pending:
            places = {*range(len(self._instances))}
        elif self._works and self._own_place is not None:
            places.add(self._own_place)
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
        """Numbers of the commands that instances are still to answer."""
        moving = [others.numbers for others in (self.moves, self._prompts) if others is not None]
        return {*self._outstanding.numbers.values()}.union(*moving)

    @property
    def _works(self) -> bool:
        """Whether the leader's own instance has samples in flight, or is about to have some."""
        return self._own is not None and (self._own.has_heard or not self._own.is_empty)

    @property
    def _may_deal(self) -> bool:
        """Whether requests can be dealt now: weights move only to instances that have nothing in flight."""
        out = self._outstanding
        return bool(out.pending) and (not out.where or self._announcer.fresh.is_fresh(self._role, "decode"))

    def add(self, request: Request) -> None:
        self._outstanding.pending.append(request)

    def advance(self, call: str) -> tuple[Done, list[Sample]]:
        """Do one step of the leader's own instance, and collect the samples that others have finished; if the leader's
        own instance has nothing to do, wait for these a short time. The record is that of the leader's own step."""
        assert self.has_work, "step without work"
        with self._announcer.status.doing(call):
            if self._may_deal:
                self._deal(call)
            own, answers = self._own if self._works else None, []
            if own is not None:
                answers = self._own_step(own, call)
                self._announcer.status.tick()
            finished = [*self._heard(answers), *self._delivered(call, POLL_S if own is None else 0.0)]
            for sample in finished:
                key = sample.prompt.uid, sample.index
                place = self._outstanding.where.pop(key)
                self.said.pop(key, None)
                self._dealer.delivered(sample, place)
                if self._speculation:
                    self._untold.drew(sample, place)
            for others in (self.moves, self._prompts):
                if others is not None:
                    others.go_on()
            if not self.has_work:
                self._forget()
                self._tell_texts()
        done = MOVED_ON if own is None else own.last_done(call)
        return replace(done, units=len(finished)), finished

    def _own_step(self, own: LockstepEngine, call: str) -> list[Heard]:
        """Do a step of the leader's own instance, in lockstep with its other ranks."""
        place = self._own_place
        assert place is not None, f"the leader has an engine of {self._role} and is in none of its instances"
        if own.has_heard:
            self._announcer.rank_state.offloads.want((self._role, "decode"))
        with self._announcer.joining(call) if own.is_joint else nullcontext():
            answers = own.step(_nothing_to_wait_for)
        self.said |= own.said
        return [(place, *answer) for answer in answers]

    def _delivered(self, call: str, wait_s: float) -> list[Sample]:
        """Samples that other instances have finished; if there are none yet, wait up to `wait_s` for some."""
        finished: list[Sample] = []
        while self._sources and (
            received := self._announcer.transport.poll(list(self._sources), wait_s, call, answers=self._waited)
        ):
            source, message = received
            finished += self._heard([(self._sources[source], *self._answer_of(message))])
            wait_s = 0.0
            if not self.has_work:
                break
        return finished

    def _answer_of(self, message: Message) -> tuple[int, Answer]:
        assert message.number is not None, f"`{message.kind}` answers no command"
        return message.number, answer_of(message)

    def _heard(self, answers: Iterable[Heard]) -> list[Sample]:
        """Take the answers of instances, the leader's own included; returns the samples among them."""
        finished: list[Sample] = []
        for place, number, answer in answers:
            prompts = self._prompts
            if isinstance(answer, Delivered):
                if prompts is not None:
                    prompts.look_again()
                finished += answer.as_asked(self._outstanding.prompts)
                self.said |= {key: tokens for key, tokens in answer.said.items() if key in self._outstanding.where}
                if answer.speculation is not None:
                    self._speculation[place] = answer.speculation
            elif prompts is not None and (isinstance(answer, Computed) or number in prompts.numbers):
                prompts.heard(number, place, answer)
            else:
                assert self.moves is not None, f"instance {place} has samples move, and none may"
                self.moves.heard(number, place, answer)
        return finished

    def _forget(self) -> None:
        """Forget prompts and moves: no sample is outstanding."""
        self.said.clear()
        self._dealer.rest()
        self._outstanding.forget_prompts()
        for others in (self.moves, self._prompts):
            if others is not None:
                others.forget()

    def _tell_texts(self) -> None:
        """Tell instances that draft what others have drawn, so that each knows what a lone one would. Samples that may
        still go on are told when they have ended."""
        if self._dealer.knows_turns:
            return
        for place, samples in self._untold.take():
            drafting = drafting_rank(self._instances[place].mesh.ranks)
            recall = Recall(self._role, DrawnTexts.told_of(samples))
            self._announcer.do(self._announcer.tell([drafting], recall, None))

    def _deal(self, call: str) -> None:
        announcer, out, role = self._announcer, self._outstanding, self._role
        needed = announcer.rank_state.copies_for(role, "decode")
        announcer.sync_weights(role, "decode")
        shares = {place: [(place, request) for request in share] for place, share in self._dealer.deal(out.pending)}
        if self._prompts is not None:
            shares = self._with_prompts_apart(self._prompts, shares)
        for place, share in shares.items():
            requests = [_without_experts(request) for _, request in share]
            command = Generate(role, call, requests, announcer.fresh.weights_number(role))
            told = announcer.tell(self._instances[place].mesh.ranks, command, needed)
            for drawing, request in share:
                out.dealt([request], drawing, told.number)
        out.pending.clear()

    def _with_prompts_apart(self, prompts: RemotePrompts, shares: Shares) -> Shares:
        """Those whose samples have not begun go to the instances that compute prompts, in the order in which they were
        asked for."""
        drawing = {request.prompt.uid: place for place, share in shares.items() for _, request in share}
        fresh = [request for request in self._outstanding.pending if not request.going_on.begun]
        begun = {
            place: kept
            for place, share in shares.items()
            if (kept := [(place, request) for _, request in share if request.going_on.begun])
        }
        return begun | prompts.deal((drawing[request.prompt.uid], request) for request in fresh)

    def halt(self, *, parks: bool) -> None:
        """See GenerationEngine."""
        self._outstanding.pending.clear()
        if self._outstanding.where:
            self._tell(self.at_work, Halt(self._role, parks))

    def give_up(self) -> None:
        """Have all instances forget their samples: nobody waits for them any longer, nor do those go on that wait for a
        reply."""
        if self.has_work:
            self._outstanding.pending.clear()
            works = self._works
            self._tell(self.at_work, Forget(self._role))
            if works and self._own is not None:
                self._own_step(self._own, f"{self._role}.generate")
            self._outstanding.where.clear()
            self._forget()
        self._untold.clear()
        if self._dealer.knows_turns:
            self.end_turns()

    def _tell(self, ranks: Collection[int], word: InstanceCommand) -> int:
        return self._announcer.tell(ranks, word, None).number

    def _tell_of_move(self, stage: Gathering) -> int:
        """Tell the instances that a stage of a move concerns to do it; the number of the command."""
        ranks = {rank for place in stage.concerned for rank in self._instances[place].mesh.ranks}
        return self._tell(ranks, Migrate(self._role, stage, self._announcer.fresh.weights_number(self._role)))

    def update_weights(self, version: int) -> None:
        """Bring the role's new weights to the instances; later samples are stamped with `version`."""
        assert not self.has_work, "weights change only while no sample is in flight"
        self._announcer.sync_weights(self._role)
        self._do(Version(self._role, version))

    def end_turns(self) -> None:
        """See GenerationEngine."""
        self._dealer.end_turns()
        self._do(EndTurns(self._role))
        self._tell_texts()

    def _do(self, command: Version | EndTurns) -> None:
        """Have all ranks of the instances do it."""
        ranks = [rank for layout in self._instances for rank in layout.mesh.ranks]
        self._announcer.do(self._announcer.tell(ranks, command, None))


def _without_experts(request: Request) -> Request:
    """What samples that go on have kept of their experts is long, and no instance reads it."""
    if not (begun := request.going_on.begun):
        return request
    begun = tuple(replace(sample, experts=None) for sample in begun)
    return replace(request, going_on=replace(request.going_on, begun=begun))


def _nothing_to_wait_for() -> None:
    raise AssertionError("the leader is told nothing that it has not said itself")
