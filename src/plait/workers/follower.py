"""A rank that is not the leader: a loop over works, each of which it does an action at a time.

Before every action it takes what the leader has sent meanwhile: further works, requests for an instance that generates
already, or word that nobody waits for something any longer. Which work goes on, `policy.turns` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from plait.policy.turns import Turn, next_turn
from plait.schedule.timeline import Span
from plait.schedule.work import MOVED_ON, Work, nothing
from plait.workers.announcer import Call
from plait.workers.commands import ScoreCall, TrainCall, TrainTogetherCall
from plait.workers.gathering import Gathering
from plait.workers.known_texts import recall_here
from plait.workers.lockstep_engine import Halt, LockstepEngine, Word
from plait.workers.messages import Do, Message, pack_samples, unpack_requests, unpack_samples
from plait.workers.peak_memory import peak_bytes
from plait.workers.rank_state import RankState
from plait.workers.ranks import LEADER, WAIT_S
from plait.workers.recorder import Recorder
from plait.workers.status_file import StatusFile
from plait.workers.transport import Transport

ALONE = Turn(0, is_alone=True)
"""As all works that are begun, it gets the number of its command."""
REPORT_S = 0.25
"""Between two reports of a call in which the leader has no part."""


@dataclass(eq=False)
class _Ongoing:
    """A work that has been announced and has not ended."""

    turn: Turn
    name: str
    """For the status."""
    step: int | None
    """The run's step, which its records belong to."""
    actions: Work[None] = field(repr=False)
    role: str = ""
    """For records."""


class FollowerLoop:
    """Serves until the leader ends it."""

    def __init__(self, rank_state: RankState, transport: Transport, status: StatusFile) -> None:
        self._rank_state = rank_state
        self._transport = transport
        self._status = status
        self._recorder = Recorder.on_shared_clock(rank_state.rank)
        rank_state.offloads.recorder = self._recorder
        self._works: dict[int, _Ongoing] = {}
        """By the number of the command."""
        self._turn = 0
        self._engines: dict[str, LockstepEngine] = {}
        """By the role that generates."""
        self._generating: set[str] = set()
        """Roles whose instance has a work."""
        self._end: int | None = None
        """The number of the command to leave."""

    def serve(self) -> None:
        """Raises what an action raises; the run is over then."""
        while True:
            self._read()
            number = next_turn([work.turn for work in self._works.values()])
            if number == self._end:
                return
            self._go_on(self._works[number])

    def _read(self) -> None:
        """Take what has come; without a work, wait for one."""
        while (received := self._transport.poll([LEADER])) is not None:
            self._take(received[1])
        while not self._works:
            self._read_one()

    def _read_one(self) -> None:
        self._take(self._transport.receive([LEADER], "the next command", WAIT_S)[1])

    def _go_on(self, work: _Ongoing) -> None:
        self._turn += 1
        work.turn = replace(work.turn, last=self._turn)
        self._recorder.step = work.step
        with self._status.doing(work.name):
            try:
                self._recorder.advance(work.actions, work.role)
            except StopIteration:
                self._works.pop(work.turn.number, None)

    # -- commands

    def _take(self, command: Message) -> None:
        header = command.header
        match Do(header["do"]):
            case Do.SCORE:
                self._take_call(ScoreCall.of(command), command)
            case Do.TRAIN:
                self._take_call(TrainCall.of(command, self._rank_state.flow), command)
            case Do.TRAIN_TOGETHER:
                self._take_call(TrainTogetherCall.of(command, self._rank_state.flow), command)
            case Do.GENERATE:
                self._ask(header["role"], command, unpack_requests(header["requests"]))
            case Do.MIGRATE:
                self._ask(header["role"], command, Gathering.of(command))
            case Do.HALT:
                self._ask(header["role"], command, Halt(header["parks"]))
            case Do.FORGET:
                self._forget(header["number"], header["role"], header["call"])
            case Do.END:
                self._leave(command)
            case do:
                name = f"{header['role']}.weights ({do})" if "role" in header else str(do)
                self._begin(header, name, self._upkeep(do, command), ALONE, role=header.get("role", ""))

    def _begin(self, header: Mapping[str, Any], name: str, actions: Work[None], turn: Turn, *, role: str = "") -> None:
        number, step = header["number"], header["at"]
        # What the plan lets leave the device makes room for what others need: no two of them at once.
        is_alone = turn.is_alone or bool(self._rank_state.offloads.units)
        turn = replace(turn, number=number, is_alone=is_alone)
        self._works[number] = _Ongoing(turn, name, step, actions, role)

    def _take_call(self, call: Call, command: Message) -> None:
        ranks = call.layout(self._rank_state).mesh.ranks
        trains = isinstance(call, (TrainCall, TrainTogetherCall))
        actions = self._calling(call, ranks, command)
        is_joint = len(ranks) > 1
        is_behind = isinstance(call, ScoreCall) and call.by is not None and call.by.is_behind
        turn = Turn(0, is_joint=is_joint, is_alone=trains, is_behind=is_behind)
        self._begin(command.header, call.call, actions, turn, role=call.role)

    def _ask(self, role: str, command: Message, word: Word) -> None:
        """An instance at work begins a later step with it; one that is not has a work more."""
        lockstep = self._lockstep(role)
        lockstep.hear(command.header["number"], word)
        if role not in self._generating:
            self._generate(role, command.header)

    def _generate(self, role: str, header: Mapping[str, Any]) -> None:
        lockstep = self._lockstep(role)
        self._generating.add(role)
        actions = self._generated(role, lockstep, header["at"])
        self._begin(header, f"{role}.generate", actions, Turn(0, is_joint=lockstep.is_joint), role=role)

    def _forget(self, number: int, role: str | None, call: int | None) -> None:
        """Requests for a role, or a call that this rank has to itself: others are in the middle of theirs together."""
        if role is not None and role in self._engines:
            self._engines[role].hear(number, None)
        if call in self._works and not self._works[call].turn.is_joint:
            del self._works[call]

    def _leave(self, command: Message) -> None:
        """What this rank does by itself ends here and now, an instance of several with its next step."""
        self._end = command.header["number"]
        for lockstep in self._engines.values():
            lockstep.hear(command.header["number"], None)
        for number in [number for number, work in self._works.items() if not work.turn.is_joint]:
            del self._works[number]
        self._begin(command.header, str(Do.END), nothing(), ALONE)

    def _lockstep(self, role: str) -> LockstepEngine:
        if role not in self._engines:
            part = self._rank_state.roles[role]
            assert part.engine is not None, f"role {role} has no engine on rank {self._rank_state.rank}"
            assert part.instance is not None, f"the engine of {role} belongs to no instance"
            self._engines[role] = LockstepEngine(part.engine, part.instance, part.mover)
        return self._engines[role]

    def _answer(self, number: int, answer: Message, what: str) -> None:
        self._transport.send(LEADER, Message({**answer.header, "answers": number}, answer.arrays), what)

    # -- works

    def _calling(self, call: Call, ranks: Sequence[int], command: Message) -> Work[None]:
        """A call that scores or trains; the first rank of a layout that the leader is not in reports to it."""
        reports = LEADER not in ranks and ranks[0] == self._rank_state.rank
        number = command.header["number"]
        self._rank_state.offloads.want(*call.needs)
        yield MOVED_ON
        work = call.run(self._rank_state)
        count, reported_s = 0, self._recorder.now_s
        while True:
            try:
                done = next(work)
            except StopIteration as end:
                result = end.value
                break
            count += 1
            if reports and self._recorder.now_s - reported_s > REPORT_S:
                self._answer(number, Message({"count": count}), "a report")
                count, reported_s = 0, self._recorder.now_s
            yield done
        if reports:
            self._answer(number, call.answer(result), "a result")

    def _generated(self, role: str, lockstep: LockstepEngine, step: int | None) -> Work[None]:
        """The steps of an instance, until it has nothing in flight; requests that it has not begun with then are a work
        of their own, so that all its ranks agree on what else comes before them."""
        delivers = lockstep.decides and self._rank_state.rank != LEADER
        self._rank_state.offloads.want((role, "decode"))
        is_empty = False
        while not is_empty:
            finished = lockstep.step(self._read_one)
            if delivers:
                for number, samples in finished.items():
                    self._answer(number, pack_samples(samples, lockstep.said, lockstep.speculation), "samples")
                for number, answer in lockstep.told:
                    self._answer(number, answer, "word of samples that move")
            lockstep.told.clear()
            is_empty = lockstep.is_empty
            yield lockstep.last_done(f"{role}.generate")
        self._generating.remove(role)
        if (number := lockstep.next_number) is not None:
            self._generate(role, {"number": number, "at": step})

    def _upkeep(self, do: Do, command: Message) -> Work[None]:
        """A command without a call of the flow behind it."""
        header, rank_state, recorder = command.header, self._rank_state, self._recorder
        match do:
            case Do.MOVE:
                yield from rank_state.moving_all(header["role"], header["numbers"])
            case Do.FOLLOW:
                yield from rank_state.following(header["role"], header["share"])
            case Do.VERSION:
                self._lockstep(header["role"]).update_weights(header["version"])
            case Do.RECALL:
                recall_here(rank_state, header["role"], unpack_samples(command, {}))
            case Do.GATHER:
                rank_state.gather(header["role"])
            case Do.SAVE:
                counts, broken = yield from rank_state.optimizers.saving(Path(header["folder"]))
                self._answer(header["number"], Message({"counts": counts, "broken": broken}), "what was saved")
            case Do.LOAD:
                torch.set_num_threads(header["threads"])
                yield from rank_state.optimizers.loading(Path(header["folder"]), header["counts"])
            case Do.SPANS:
                rank_state.offloads.want()
                spans = _as_values(recorder.take().spans, header["zero"])
                uses = [astuple(lockstep.take_use()) for lockstep in self._engines.values()]
                answer = Message({"spans": spans, "uses": uses, "peak_bytes": peak_bytes()})
                self._answer(header["number"], answer, "a timeline")
            case _:
                raise AssertionError(f"a command `{do}` that nobody serves")


def _as_values(spans: Sequence[Span], zero_s: float) -> list[Any]:
    """For a message; the times are shifted to a clock that began at `zero_s`."""
    return [list(astuple(replace(span, start_s=span.start_s - zero_s, end_s=span.end_s - zero_s))) for span in spans]
