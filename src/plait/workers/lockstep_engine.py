"""This rank as a member of an instance that generates: it takes requests while it works, in lockstep with the others.

All ranks of an instance step the same engine, each on its part of the model, and make the same decisions from the same
requests. Every request is sent to each of them, and arrives at different times; so one rank says which requests a step
takes up.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import torch

from plait.data.records import Sample
from plait.generation.engine import Engine
from plait.generation.step_record import StepRecord
from plait.models.parallel.team import Team
from plait.models.parallel.transfer import Transfer
from plait.policy.decode_ring import StageUse
from plait.policy.step import Key
from plait.schedule.work import LINK, MOVED_ON, Done
from plait.workers.call_messages import TELL_STEPS, Answer, Delivered, Forget, Generate, Halt, InstanceCommand, Migrate
from plait.workers.gathering import Computed, Gathering, MoveWord, Stage, Through
from plait.workers.instances import deciding
from plait.workers.rank_state import RankState
from plait.workers.step_links import Kind, OneToAll, Waited

if TYPE_CHECKING:
    from plait.workers.migrations import SampleMoverOfRank
    from plait.workers.prompt_moves import PromptMoverOfRank

WAIT_FOR_PROMPTS_S = 0.01
"""Seconds that a step waits for prompts that are on their way, if there is nothing else to do."""


class LockstepEngine:
    """The engine of this rank, and the commands of the leader to its instance.

    Before a step the rank that decides (the leader if it is in the instance, else the first) tells the others the
    number of the newest command that it has, in 8 bytes. They take up all commands up to that one, and wait for those
    that have not come yet. A rank that generates alone tells nobody.
    """

    def __init__(
        self, engine: Engine, team: Team, mover: SampleMoverOfRank | None, prompts: PromptMoverOfRank | None
    ) -> None:
        self._engine = engine
        self._mover, self._prompts = mover, prompts
        self._peers = team.all
        self._waited = Waited()
        self._words = OneToAll(team.all, deciding(team), Kind.WORD, "what a step begins with", self._waited)
        self._coming: Transfer | None = None
        """The number that the next step begins with, received ahead."""
        self._stage = (team.pp.index, team.pp.size)
        self._use = StageUse(*self._stage)
        """How busy this rank was since `take_use`."""
        self._heard: deque[tuple[int, InstanceCommand]] = deque()
        """Commands that no step has taken up yet, in their order."""
        self._newest = -1
        """The number of the last command that came."""
        self._weights = 0
        """The number of the weights that the engine last began to work with (`Generate.weights`)."""
        self._asked: dict[int, int] = {}
        """Uid of a prompt whose samples are being generated → number of the command that asked for them."""
        self.last_bytes = 0
        """Bytes of activations that came from other ranks in the last step."""
        self.last_step: StepRecord | None = None
        """None after a step that computed nothing."""
        self._told: list[tuple[int, MoveWord]] = []
        """Answers to commands that move samples, which `step` is to return."""
        self._moved: tuple[str, int] | None = None
        """How samples or prompts came or left in the last step, which then did nothing else, and bytes that came; else
        None."""
        self._tells_first = False
        """Whether something of prompts is to be told before anything is computed: a step of prompts is long."""
        self._is_due = False
        """Whether it was told which prompts the next step will have computed: so it does, whatever comes meanwhile."""
        self._quiet = 0
        """Steps since a sample ended."""
        self._giving: int | None = None
        """The command by which keys and values are being sent ahead; else None."""

    @property
    def said(self) -> dict[Key, int]:
        """`GenerationEngine.said`, of this instance."""
        return self._engine.said

    @property
    def is_joint(self) -> bool:
        """Whether the instance has other ranks."""
        return self._peers.size > 1

    def last_done(self, call: str) -> Done:
        """The record of the last step as an action of a call; MOVED_ON if it neither computed nor moved samples."""
        if self._moved is not None:
            name, num_bytes = self._moved
            return Done(f"{call}/{name}", "SAMPLES", bytes=num_bytes, lane=LINK, units=0)
        if self.last_step is None:
            return MOVED_ON
        return self.last_step.done(call, self.last_bytes, units=self.last_step.num_finished)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to step: the engine has nothing in flight, or only prompts that others are to take,
        and none is on its way. This is so after the same step on all ranks of an instance."""
        return not (self._may_compute or (self._prompts is not None and self._prompts.is_under_way))

    @property
    def _may_compute(self) -> bool:
        return self._engine.has_work and (self._prompts is None or self._prompts.may_step)

    @property
    def next_number(self) -> int | None:
        """The first command that no step has taken up, and that needs a step; None: there is none."""
        return next((number for number, word in self._heard if not isinstance(word, Forget)), None)

    @property
    def decides(self) -> bool:
        """Whether this rank says which commands a step takes up. It also delivers the samples to a leader elsewhere."""
        return self._words.tells

    def take_use(self) -> StageUse:
        """How busy this rank was in its steps, since somebody last took it."""
        use, self._use = self._use, StageUse(*self._stage)
        return use

    def update_weights(self, version: int) -> None:
        """The weights have changed while nothing is in flight."""
        self._engine.update_weights(version)

    def end_turns(self) -> None:
        """Samples that have ended do not go on."""
        self._engine.state.scheduler.turns.end()
        self._engine.rest()

    @property
    def has_heard(self) -> bool:
        """Whether there is a step to do for something new."""
        return self.next_number is not None

    def hear(self, number: int, word: InstanceCommand) -> None:
        """A command of this number, with which a later step begins."""
        assert number > self._newest, f"command {number} came behind {self._newest}"
        self._heard.append((number, word))
        self._newest = number

    def step(self, read: Callable[[], None]) -> list[tuple[int, Answer]]:
        """Take what the instance begins this step with, and compute it, if there is something to compute.

        Args:
            read: waits for the next command, and has it heard if it is for this instance.

        Returns:
            The number of a command, and what is said of it now: samples that it asked for and that are finished; after
            every TELL_STEPS steps without any, none, so that who waits for some is told what they have said. Of samples
            that move, how far that is.
        """
        began, waited_s = time.perf_counter(), self._waited.seconds
        self.last_step, self._moved, self._tells_first = None, None, False
        samples = self._take(self._agreed(read))
        if self._prompts is not None and not self._is_due:
            self._tell_what_is_due(self._prompts)
        before = self._engine.model.team.received_bytes
        if self._may_compute and self._moved is None and not self._tells_first:
            samples += self._engine.step()
            self._is_due = False
            self.last_step = self._engine.last_step
            self.last_bytes = self._engine.model.team.received_bytes - before
        if self.last_step is not None:
            waited_s = self._waited.seconds - waited_s + self.last_step.waited_s
            self._use.add(time.perf_counter() - began, waited_s, self.last_step.num_groups)
        if self._giving is not None and self._mover is not None and (self.is_empty or self._mover.is_through):
            self._told.append((self._giving, Through()))
            self._giving = None
        if self._prompts is not None:
            self._tell_of_prompts(self._prompts)
        finished: dict[int, list[Sample]] = defaultdict(list)
        for sample in samples:
            if (number := self._asked.get(sample.prompt.uid)) is not None:  # else it was forgotten as it ended
                finished[number].append(sample)
        self._quiet = 0 if finished else self._quiet + 1
        if self._quiet == TELL_STEPS:
            self._quiet = 0
            finished |= {self._asked[uid]: [] for uid, _ in islice(self._engine.said, 1) if uid in self._asked}
        if self.is_empty:
            if not self._engine.has_work:
                self._asked.clear()
            self._words.rest()
        elif self.is_joint and not self.decides:
            self._coming = self._words.listen(_word(0))
        told, self._told = self._told, []
        return [*((number, self._delivered(of_command)) for number, of_command in finished.items()), *told]

    def _tell_what_is_due(self, prompts: PromptMoverOfRank) -> None:
        """Before a step of prompts: what it will have computed. So the command to give it away may come meanwhile."""
        if due := prompts.due():
            self._tell_computed(due)
            self._tells_first = self._is_due = True

    def _tell_of_prompts(self, prompts: PromptMoverOfRank) -> None:
        """Tell the leader which prompts were computed for other instances, and which have come from them."""
        is_idle = self._moved is None and not self._tells_first and not self._may_compute
        self._told += prompts.news(WAIT_FOR_PROMPTS_S if is_idle else 0.0)
        self._tell_computed(prompts.computed())

    def _tell_computed(self, uids: Sequence[int]) -> None:
        by_number: dict[int, list[int]] = defaultdict(list)
        for uid in uids:
            by_number[self._asked[uid]].append(uid)
        self._told += [(number, Computed(some)) for number, some in by_number.items()]

    def _delivered(self, samples: Sequence[Sample]) -> Delivered:
        return Delivered(samples, self._engine.said, self._engine.speculation)

    def _agreed(self, read: Callable[[], None]) -> int:
        """The newest command that the rank that decides has heard; this one has heard it, too."""
        if not self.is_joint:
            return self._newest
        if self.decides:
            self._words.tell(_word(self._newest))
            return self._newest
        coming, self._coming = self._coming or self._words.listen(_word(0)), None
        newest = int(self._waited.wait(coming))
        while self._newest < newest:
            read()
        return newest

    def _take(self, newest: int) -> list[Sample]:
        """Begin with the commands up to this one; the samples that they have stopped."""
        halted: list[Sample] = []
        if self._is_due:  # nothing else is taken up, but to forget all that came before
            newest = max((n for n, word in self._heard if n <= newest and isinstance(word, Forget)), default=-1)
            self._heard = deque(heard for heard in self._heard if heard[0] >= newest)
        while self._heard and self._heard[0][0] <= newest:
            number, word = self._heard.popleft()
            if isinstance(word, Generate | Migrate):
                self._know_weights(word.weights)
            match word:
                case Generate(requests=requests):
                    for request in requests:
                        self._engine.add(request)
                        self._asked[request.prompt.uid] = number
                case Migrate(gathering=gathering):
                    self._gather(number, gathering)
                case Halt(parks=parks):
                    halted += self._engine.halt(parks=parks)
                case Forget():
                    for uid in self._asked:
                        self._engine.abort(uid)
                    self._asked.clear()
                    self._is_due = False
                    if self._prompts is not None:
                        self._prompts.forget()
        return halted

    def _know_weights(self, number: int) -> None:
        """Before work: cached prefixes stay if they are of weights of this number. What a rank finds written on its own
        device says less: weights that come back, or that are moved anew, are written where they were away."""
        if not self._engine.has_work:
            self._engine.state.expect_work(are_new=number != self._weights)
            self._weights = number

    def _gather(self, number: int, gathering: Gathering) -> None:
        if gathering.is_of_prompts:
            self._gather_prompts(number, gathering)
            return
        mover = self._mover
        assert mover is not None, "samples move between instances, and this one has no way to another"
        if (answer := mover.do(gathering)) is not None:
            self._told.append((number, answer))
        if gathering.stage is Stage.GIVE:
            self._giving = number
        if gathering.stage is not Stage.REST:
            return
        self._moved = f"samples{number}", mover.received_bytes
        for (_, target), keys in gathering.pairs.items():
            if target == mover.place:
                self._asked |= {uid: gathering.numbers[uid] for uid, _ in keys}

    def _gather_prompts(self, number: int, gathering: Gathering) -> None:
        prompts = self._prompts
        assert prompts is not None, "prompts are computed elsewhere, and this instance has no way there"
        if (answer := prompts.do(number, gathering)) is not None:
            self._told.append((number, answer))
            self._tells_first = True
        [((source, target), keys)] = gathering.pairs.items()
        if prompts.place == source and gathering.stage in (Stage.GIVE, Stage.REST):
            for uid, _ in keys:
                self._asked.pop(uid, None)
        if prompts.place == target and gathering.stage in (Stage.ENTER, Stage.REST):
            self._moved = f"prompts{number}", prompts.received_bytes
            self._asked |= {uid: gathering.numbers[uid] for uid, _ in keys}


def join_instance(rank_state: RankState, role: str) -> LockstepEngine | None:
    """This rank as a member of its instance of a role, which hears words for it from now on; None: it is in none."""
    role_state = rank_state.roles.get(role)
    if role_state is None or role_state.engine is None:
        return None
    assert role_state.instance is not None, f"the engine of {role} belongs to no instance"
    member = rank_state.listeners[role] = LockstepEngine(
        role_state.engine, role_state.instance, role_state.mover, role_state.prompts
    )
    return member


def _word(number: int) -> torch.Tensor:
    """int64 [1]"""
    return torch.tensor([number])
