"""Generation as the leader has it: requests dealt to the instances of a role, samples gathered as they are finished."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from plait.data.records import FinishReason, Prompt, Sample
from plait.generation.engine import Engine
from plait.generation.request import Request
from plait.generation.settings import Sampling
from plait.kernels.noise import NoiseKey
from plait.layout.mesh import Layout
from plait.policy.decode_ring import StageUse
from plait.policy.migration import AT_ONCE, HowToMove, InstanceLoad, Unfinished, decide
from plait.policy.step import Key
from plait.schedule.work import MOVED_ON, Done
from plait.speculation.counts import Counts
from plait.workers.announcer import Announcer
from plait.workers.gathering import Gathering, Stage
from plait.workers.lockstep_engine import Halt, LockstepEngine
from plait.workers.messages import Do, Message, pack_requests, unpack_samples, unpack_speculation
from plait.workers.ranks import LEADER
from plait.workers.staged_move import StagedMove

_ROOM = 1 << 62
"""What does not fit into the keys and values of an instance waits there: it need not be known here."""
POLL_S = 0.05
"""An engine's step waits so long for samples of other ranks, where its own has nothing to do."""


class RemoteEngine:
    """`generation.engine.Engine` for the leader, over the instances of a role.

    Requests are dealt out when the next step begins: the longest expected first, each to the instance with the least
    expected tokens of its rollout. So who generates what depends on the requests alone. Instances at work take them
    with one of their next steps.
    """

    def __init__(self, announcer: Announcer, role: str) -> None:
        self._announcer = announcer
        self._role = role
        self.instances: tuple[Layout, ...] = announcer.rank_state.places[role].generate
        part = announcer.rank_state.roles.get(role)
        self._own: Engine | None = part.engine if part is not None else None
        self._own_place = next((i for i, one in enumerate(self.instances) if LEADER in one.mesh.ranks), None)
        self._lockstep: LockstepEngine | None = None
        """The leader's place in its own instance."""
        if part is not None and part.engine is not None and part.instance is not None:
            self._lockstep = LockstepEngine(part.engine, part.instance, part.mover)
        self._pending: list[Request] = []
        self._prompts: dict[int, Prompt] = {}
        self._where: dict[Key, int] = {}
        """Unfinished sample → the number of its instance."""
        self._numbers: dict[int, int] = {}
        """Prompt → the command that asked for its samples, which they are delivered under."""
        self._leaving: dict[int, list[Key]] = {}
        """Instance → samples that are about to leave it."""
        self._began: dict[Key, int] = {}
        """Sample that has moved → the instance that it began in, which may have others of its prompt to begin with."""
        self._moving: StagedMove | None = None
        """Samples that are on their way to other instances."""
        self._num_moves = 0
        self._moved_at_s = 0.0
        self.moved_s: float | None = None
        self._loads = [0] * len(self.instances)
        """Expected tokens of what each instance was given of the rollout, done or not: who was idle when is the clock's
        to say."""
        self._rollout: tuple[NoiseKey, Sampling] | None = None
        """What the requests that are dealt have in common."""
        self._parked: dict[int, int] = {}
        """Prompt → the instance where samples of it lie parked."""
        self._speculation: dict[int, Counts] = {}
        """By the rank that delivers samples, as of its last ones."""
        self.policy_version = 0

    @property
    def model(self) -> Any:
        """The leader's part; None: it has none."""
        return None if self._own is None else self._own.model

    @property
    def not_compiled(self) -> str | None:
        """What the leader's own part does not compile, and why."""
        return None if self._own is None else self._own.not_compiled

    @property
    def speculation(self) -> Counts | None:
        """Counts of all instances, as far as they have told them with their samples."""
        own = None if self._own is None else self._own.speculation
        known = [*self._speculation.values(), *([] if own is None else [own])]
        return sum(known, Counts()) if known else None

    def take_use(self) -> StageUse | None:
        """See `LockstepEngine.take_use`, of the leader in its own instance; None: it is in none."""
        return None if self._lockstep is None else self._lockstep.take_use()

    @property
    def has_work(self) -> bool:
        return bool(self._pending or self._where or self._moving)

    @property
    def keeps_weights(self) -> bool:
        """See GenerationEngine.keeps_weights."""
        return bool(self._announcer.rank_state.held_copies[self._role])

    @property
    def shares_devices(self) -> bool:
        """See GenerationEngine.shares_devices."""
        return self._announcer.rank_state.keeps_all

    @property
    def at_work(self) -> frozenset[int]:
        """Ranks of the instances that have samples, or are about to get or to give some."""
        places = {*self._where.values(), *(self._moving.gathering.instances if self._moving else ())}
        if self._pending:
            places = {*range(len(self.instances))}
        elif self._works and self._own_place is not None:
            places.add(self._own_place)
        return frozenset(rank for place in places for rank in self.instances[place].mesh.ranks)

    @property
    def ready(self) -> bool:
        """Whether `step` would do something at once."""
        if self._may_deal or self._works:
            return True
        waited = self._waited
        return any(self._announcer.transport.has(source, number) for source in self._sources for number in waited)

    @property
    def _waited(self) -> set[int]:
        """Commands that others are to answer."""
        return {*self._numbers.values(), *(self._moving.numbers if self._moving else ())}

    @property
    def _works(self) -> bool:
        """Whether the leader's own instance has something in flight, or is about to."""
        lockstep = self._lockstep
        return lockstep is not None and (lockstep.has_heard or not lockstep.is_empty)

    @property
    def _may_deal(self) -> bool:
        """Weights are moved only to instances that have nothing in flight."""
        return bool(self._pending) and (not self._where or self._announcer.is_fresh(self._role, "decode"))

    @property
    def _sources(self) -> dict[int, int]:
        """Rank that delivers samples → its instance, of those that the leader has no part in."""
        return {one.mesh.ranks[0]: i for i, one in enumerate(self.instances) if i != self._own_place}

    def add(self, request: Request) -> None:
        self._pending.append(request)

    def step(self) -> list[Sample]:
        """One step of the leader's own instance, and what others have finished meanwhile; where that is nothing, it
        waits for them, but not for long."""
        return self.advance(f"{self._role}.generate")[1]

    def advance(self, call: str) -> tuple[Done, list[Sample]]:
        """As `step`: what the leader's own instance did, as an action of a call, and the samples that are finished."""
        assert self.has_work, "step without work"
        with self._announcer.status.doing(f"{self._role}.generate"):
            worked, finished = self._step()
        done = MOVED_ON if not worked or self._lockstep is None else self._lockstep.last_done(call)
        return replace(done, units=len(finished)), finished

    def _step(self) -> tuple[bool, list[Sample]]:
        if self._may_deal:
            self._deal()
        finished: list[Sample] = []
        if works := self._works:
            finished += self._own_step()
            self._announcer.status.tick()
        sources = self._sources
        wait_s = 0.0 if works else POLL_S
        while sources and (
            found := self._announcer.transport.poll(
                list(sources), wait_s, f"{self._role}.generate", answers=self._waited
            )
        ):
            source, answer = found
            if self._moving is not None and (number := answer.header["answers"]) in self._moving.numbers:
                self._heard(number, sources[source], answer)
            else:
                finished += unpack_samples(answer, self._prompts)
                if (counts := unpack_speculation(answer)) is not None:
                    self._speculation[source] = counts
            wait_s = 0.0
            if not self.has_work:
                break
        for sample in finished:
            place = self._where.pop((sample.prompt.uid, sample.index))
            if sample.finish_reason is FinishReason.OPEN:
                self._parked[sample.prompt.uid] = place
        self._move_on()
        if not self.has_work:
            for kept in (self._prompts, self._numbers, self._began):
                kept.clear()
        return works, finished

    def _heard(self, number: int, place: int, word: Message) -> None:
        """An instance says something of samples that move. Those that had not begun there when others left, stay."""
        assert self._moving is not None, f"instance {place} has samples move, and nobody asked it"
        self._moving.heard(number, place, word)
        if (left := word.header.get("left")) is None:
            return
        gone = {(uid, index) for uid, index in left}
        for key in self._leaving.pop(place):
            if key in self._where and key not in gone:
                self._where[key] = place
        if self._moving.is_over:
            self._moving = None
            self.moved_s = time.perf_counter() - self._moved_at_s

    def _move_on(self) -> None:
        """Have the next stage of a move done, if nothing has to be heard before."""
        moving = self._moving
        while moving is not None and (stage := moving.due(self._where)) is not None:
            if stage.stage is Stage.REST:
                self._begin_to_leave(stage)
            ranks = {rank for place in stage.concerned for rank in self.instances[place].mesh.ranks}
            number = self._announcer.tell(ranks, stage.to_message(self._role), None)
            moving.told(stage, number)
            if self._own_place in stage.concerned:
                assert self._lockstep is not None, "the leader's instance has no engine"
                self._announcer.rank_state.offloads.want((self._role, "decode"))
                self._lockstep.hear(number, stage)

    def _begin_to_leave(self, gathering: Gathering) -> None:
        """From now on they stand still, and count in their targets."""
        self._moved_at_s = time.perf_counter()
        self._leaving = {source: [] for source in gathering.sources}
        for (source, target), keys in gathering.pairs.items():
            self._leaving[source] += keys
            for key in keys:
                self._where[key] = target
                self._began.setdefault(key, source)

    @property
    def num_instances(self) -> int:
        return len(self.instances)

    @property
    def gathers(self) -> bool:
        return self._announcer.rank_state.fuses

    @property
    def running(self) -> tuple[int, ...]:
        counts = Counter(self._where.values())
        return tuple(counts[place] for place in range(len(self.instances)))

    @property
    def moves_samples(self) -> bool:
        return self._announcer.rank_state.moves_samples and len(self.instances) > 1

    @property
    def unfinished(self) -> tuple[tuple[Key, ...], ...]:
        found: list[list[Key]] = [[] for _ in self.instances]
        for key, place in self._where.items():
            found[place].append(key)
        return tuple(map(tuple, found))

    @property
    def is_moving(self) -> bool:
        return self._moving is not None

    def gathering(self, max_batch: int) -> dict[tuple[int, int], list[Key]]:
        """See GenerationEngine.gathering. It is decided by what the leader knows: it counts samples, and the tokens of
        their prompts. None moves where one would come back to where it began."""
        loads = [InstanceLoad(place, tuple(self._unfinished_of(place)), _ROOM) for place in range(len(self.instances))]
        loads = [load for load in loads if load.unfinished]
        migration = None if self._pending or len(loads) < 2 else decide(loads, len(self._where), max_batch)
        if migration is None or self._moving is not None:
            return {}
        keys = list(self._where)
        pairs: dict[tuple[int, int], list[Key]] = defaultdict(list)
        for move in migration.moves:
            pairs[move.source, move.target].append(keys[move.sample])
        if any(self._began.get(key) == target for (_, target), moved in pairs.items() for key in moved):
            return {}
        return dict(pairs)

    def move(self, pairs: Mapping[tuple[int, int], Sequence[Key]], how: HowToMove = AT_ONCE) -> int:
        """See GenerationEngine.move."""
        here = {pair: [key for key in keys if self._where.get(key) == pair[0]] for pair, keys in pairs.items()}
        here = {pair: keys for pair, keys in here.items() if keys}
        if self._moving or self._pending or not here:
            return 0
        self.moved_s = None
        self._num_moves += 1
        numbers = {uid: self._numbers[uid] for keys in here.values() for uid, _ in keys}
        prompts = [self._prompts[uid] for uid in numbers] if how.ahead else ()
        gathering = Gathering(here, numbers, how.recompute, move=self._num_moves, prompts=prompts)
        self._moving = StagedMove(gathering, ahead=how.ahead)
        self._move_on()
        return sum(map(len, here.values()))

    def _unfinished_of(self, place: int) -> Iterator[Unfinished]:
        for number, ((uid, _), where) in enumerate(self._where.items()):
            if where == place:
                yield Unfinished(number, len(self._prompts[uid].token_ids), 0)

    def _own_step(self) -> list[Sample]:
        """A step of the leader's instance, in lockstep with the other ranks of it, if there are any."""
        lockstep = self._lockstep
        assert lockstep is not None, "the leader's instance has no engine"
        joining = self._announcer.joining(f"{self._role}.generate") if lockstep.is_joint else nullcontext()
        with joining:
            found = lockstep.step(_nothing_to_wait_for)
        for number, said in lockstep.told:
            assert self._own_place is not None, "an engine of no instance"
            self._heard(number, self._own_place, said)
        lockstep.told.clear()
        return [sample for samples in found.values() for sample in samples]

    def halt(self, *, parks: bool) -> None:
        """See GenerationEngine.halt."""
        self._pending.clear()
        if not self._where:
            return
        ranks = [rank for one in self.instances for rank in one.mesh.ranks if rank in self.at_work]
        header = {"do": Do.HALT, "role": self._role, "parks": parks}
        number = self._announcer.tell(ranks, Message(header), None)
        if self._works:
            assert self._lockstep is not None, "the leader's instance has no engine"
            self._lockstep.hear(number, Halt(parks))

    def give_up(self) -> None:
        """Nobody waits for the samples any longer: they are forgotten."""
        if not self.has_work:
            return
        self._pending.clear()
        ranks = [rank for one in self.instances for rank in one.mesh.ranks if rank in self.at_work]
        number = self._announcer.tell(ranks, Message({"do": Do.FORGET, "role": self._role, "call": None}), None)
        if self._works:
            assert self._lockstep is not None, "the leader's instance has no engine"
            self._lockstep.hear(number, None)
            self._own_step()
        for kept in (self._where, self._prompts, self._numbers, self._began, self._leaving):
            kept.clear()
        self._moving = None

    def update_weights(self, version: int) -> None:
        """The role's weights have changed: bring them to the instances; later samples are stamped with `version`."""
        assert not self.has_work, "weights change only while no sample is in flight"
        self._announcer.sync_weights(self._role)
        ranks = [rank for one in self.instances for rank in one.mesh.ranks]
        self._announcer.tell(ranks, Message({"do": Do.VERSION, "role": self._role, "version": version}), None)
        if self._own is not None:
            self._own.update_weights(version)
        self.policy_version = version

    def _deal(self) -> None:
        announcer = self._announcer
        needed = announcer.rank_state.copies_for(self._role, "decode")
        announcer.sync_weights(self._role, "decode")
        if self._rollout != (rollout := (self._pending[0].noise, self._pending[0].sampling)):
            self._rollout, self._loads = rollout, [0] * len(self.instances)
        order = sorted(range(len(self._pending)), key=lambda i: (-_expected_tokens(self._pending[i]), i))
        shares: dict[int, list[int]] = defaultdict(list)
        for i in order:
            parked = self._parked.pop(self._pending[i].prompt.uid, None)
            place = min(range(len(self.instances)), key=lambda k: (self._loads[k], k))
            if parked is not None and self._pending[i].going_on.keeps:
                place = parked
            self._loads[place] += _expected_tokens(self._pending[i])
            shares[place].append(i)
        for place, members in sorted(shares.items()):
            requests = [self._pending[i] for i in sorted(members)]
            message = Message({"do": Do.GENERATE, "role": self._role, "requests": pack_requests(requests)})
            number = announcer.tell(self.instances[place].mesh.ranks, message, needed)
            for request in requests:
                self._numbers[request.prompt.uid] = number
                self._where |= {(request.prompt.uid, index): place for index in request.indices}
            if place == self._own_place:
                assert self._lockstep is not None, "the leader's instance has no engine"
                announcer.rank_state.offloads.want((self._role, "decode"))
                self._lockstep.hear(number, requests)
            self._prompts |= {request.prompt.uid: request.prompt for request in requests}
        self._pending.clear()


def _nothing_to_wait_for() -> None:
    raise AssertionError("the leader is told nothing that it has not said itself")


def _expected_tokens(request: Request) -> int:
    """Tokens of prompt and responses; without recorded lengths, responses that reach their limit."""
    lengths = request.lengths or (request.sampling.max_tokens,) * request.num_samples
    said = sum(len(sample.token_ids) for sample in request.going_on.begun)
    return len(request.prompt.token_ids) + sum(lengths[index] for index in request.indices) - said
