"""A rank that is not the leader: a loop that does its works an action at a time.

Before every action it reads what the leader has sent: new works, requests for an instance that already generates, or
that nobody waits for something any longer. `policy.turns` decides which work goes on.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from plait.policy.turns import ALONE, Turn, next_turn
from plait.schedule.work import Work, nothing
from plait.workers.announcer import name_of
from plait.workers.call_messages import Forget, ForgetCall, Generate, Halt, Migrate, Report
from plait.workers.commands import Call, End, Upkeep, command_of
from plait.workers.lockstep_engine import LockstepEngine, join_instance
from plait.workers.messages import Message
from plait.workers.rank_state import RankState
from plait.workers.ranks import LEADER, WAIT_S
from plait.workers.recorder import Recorder
from plait.workers.score_call import ScoreCall
from plait.workers.status_file import StatusFile
from plait.workers.train_calls import EvaluateCall, TrainCall
from plait.workers.transport import Transport
from plait.workers.upkeep import Recall

REPORT_S = 0.25
"""Seconds between two reports of a call in which the leader has no part."""


@dataclass(eq=False)
class _Ongoing:
    """A work that has been announced and has not ended."""

    turn: Turn
    name: str
    """For the status file."""
    step: int | None
    """The step of the run that its records belong to."""
    actions: Work[None] = field(repr=False)
    role: str = ""
    """For records."""


class FollowerLoop:
    """Serves the leader's commands until the leader ends the run."""

    def __init__(self, rank_state: RankState, transport: Transport, status: StatusFile) -> None:
        self._rank_state = rank_state
        self._transport = transport
        self._status = status
        self._recorder = Recorder.on_shared_clock(rank_state.rank)
        rank_state.offloads.recorder = self._recorder
        self._works: dict[int, _Ongoing] = {}
        """Number of a command → its work."""
        self._turn = 0
        members = {role: join_instance(rank_state, role) for role in rank_state.roles}
        self._engines = {role: member for role, member in members.items() if member is not None}
        """Role that generates → this rank as a member of its instance."""
        self._generating: set[str] = set()
        """Roles whose instance has a work now."""
        self._told_in: defaultdict[str, dict[int, tuple[int | None, str]]] = defaultdict(dict)
        """Role → number of a command for its instance → the run's step in which it was told, and the call that the
        instance's steps are recorded under."""
        self._end: int | None = None
        """The number of the command that ends the run."""

    def serve(self) -> None:
        """Serve to the end of the run. Raises what an action raises."""
        while True:
            self._read()
            number = next_turn([work.turn for work in self._works.values()])
            if number == self._end:
                return
            self._go_on(self._works[number])

    def _read(self) -> None:
        """Take all commands that have come; without a work, wait for one."""
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

    def _take(self, message: Message) -> None:
        number, command = message.number, command_of(message, self._rank_state.flow)
        assert number is not None, f"a command `{message.kind}` without a number"
        match command:
            case Generate() | Migrate() | Halt():
                self._rank_state.take(number, command)
                call = command.call if isinstance(command, Generate) else f"{command.role}.generate"
                self._told_in[command.role][number] = message.step, call
                if command.role not in self._generating:  # an instance at work begins a later step with it
                    self._generate(command.role, number)
            case Forget():
                self._rank_state.take(number, command)
            case Recall():  # at once, whatever is under way: others wait for no part of it
                self._recorder.drain(self._rank_state.take(number, command), command.role)
            case ForgetCall():
                self._forget(command.call)
            case End():
                self._leave(number, message.step)
            case ScoreCall() | EvaluateCall() | TrainCall():
                self._take_call(number, message.step, command)
            case _:
                work, turn = self._upkeep(number, command), replace(ALONE, number=number)
                self._begin(_Ongoing(turn, name_of(command), message.step, work, command.role))

    def _begin(self, work: _Ongoing) -> None:
        # Where the plan lets memory leave the device, each work makes room for what it needs: one work at a time then.
        work.turn = replace(work.turn, is_alone=work.turn.is_alone or bool(self._rank_state.offloads.units))
        self._works[work.turn.number] = work

    def _take_call(self, number: int, step: int | None, call: Call) -> None:
        """Begin a call. If the leader is not in its layout, the first rank of the layout reports to the leader."""
        ranks = call.layout(self._rank_state).mesh.ranks
        work = self._rank_state.take(number, call)
        if LEADER not in ranks and ranks[0] == self._rank_state.rank:
            work = self._reported(number, call, work)
        turn = replace(call.turn, number=number, is_joint=len(ranks) > 1)
        self._begin(_Ongoing(turn, call.call, step, work, call.role))

    def _generate(self, role: str, number: int) -> None:
        lockstep, told_in = self._engines[role], self._told_in[role]
        step, call = told_in[number]
        self._told_in[role] = {later: told for later, told in told_in.items() if later > number}
        self._generating.add(role)
        turn = Turn(number, is_joint=lockstep.is_joint)
        self._begin(_Ongoing(turn, call, step, self._generated(role, lockstep, call), role))

    def _forget(self, call: int) -> None:
        """Drop a call, unless other ranks are in the middle of it too."""
        if call in self._works and not self._works[call].turn.is_joint:
            del self._works[call]

    def _leave(self, number: int, step: int | None) -> None:
        """Drop all that this rank does by itself; an instance of several ranks ends with its next step."""
        self._end = number
        for role in self._engines:
            self._rank_state.take(number, Forget(role))
        for call in list(self._works):
            self._forget(call)
        self._begin(_Ongoing(replace(ALONE, number=number), End.kind, step, nothing()))

    def _answer(self, number: int, answer: Message) -> None:
        self._transport.send(LEADER, replace(answer, number=number), answer.kind)

    # -- works

    def _reported(self, number: int, call: Call, work: Work[Any]) -> Work[None]:
        """A call that the leader has no part in: tell it the progress and the result."""
        yield next(work)  # brings what it needs to the device
        count, reported_s = 0, self._recorder.now_s
        while True:
            try:
                done = next(work)
            except StopIteration as end:
                return self._answer(number, call.answer(end.value))
            count += 1
            if self._recorder.now_s - reported_s > REPORT_S:
                self._answer(number, Report(count).to_message())
                count, reported_s = 0, self._recorder.now_s
            yield done

    def _generated(self, role: str, lockstep: LockstepEngine, call: str) -> Work[None]:
        """Step an instance until it has nothing in flight. Requests that it has not taken up by then become a work of
        their own, so that all its ranks agree on what comes before them."""
        self._rank_state.offloads.want((role, "decode"))
        is_empty = False
        while not is_empty:
            answers = lockstep.step(self._read_one)
            for number, answer in answers if lockstep.decides else ():
                self._answer(number, answer.to_message())
            is_empty = lockstep.is_empty
            yield lockstep.last_done(call)
        self._generating.remove(role)
        if (number := lockstep.next_number) is not None:
            self._generate(role, number)

    def _upkeep(self, number: int, command: Upkeep) -> Work[None]:
        result = yield from self._rank_state.take(number, command)
        if result is not None:
            self._answer(number, result.to_message())
