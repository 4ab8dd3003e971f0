"""The leader announces commands to the ranks of a run: calls, upkeep, and moves of weights to where calls need them.

All ranks see the commands in one order, so that their collectives never cross.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from torch import Tensor

from plait.layout.mesh import Layout
from plait.schedule.plan import Mode
from plait.schedule.work import MOVED_ON, Done, Work, nothing, to_the_end
from plait.training.optimizer import AVERAGED
from plait.workers.call_messages import ForgetCall, InstanceCommand, Report, Told
from plait.workers.freshness import Copy, Freshness
from plait.workers.messages import Message
from plait.workers.offload_manager import Need
from plait.workers.rank_state import RankCommand, RankState
from plait.workers.ranks import LEADER, WAIT_S
from plait.workers.recorder import Recorder
from plait.workers.status_file import StatusFile
from plait.workers.transport import Transport
from plait.workers.wire_forms import Record


@dataclass(frozen=True)
class Move(Record):
    """Move a role's weights from its home to some of its copies, by their numbers in `RankState.copies`."""

    role: str
    numbers: Sequence[int]

    kind: ClassVar[str] = "move"

    def run(self, rank_state: RankState) -> Work[None]:
        return rank_state.moving_all(self.role, self.numbers)


@dataclass(frozen=True)
class Follow(Record):
    """Bring a role's weights to the slow average of the weights of the role that it follows.

    share: weight of the other's current weights in the average, which is updated first; None: the average stays as is
    """

    role: str
    share: float | None

    kind: ClassVar[str] = "follow"

    def run(self, rank_state: RankState) -> Work[None]:
        role, rank = self.role, rank_state.rank
        plan = rank_state.follow_moves.get(role)
        if plan is None:
            return
        followed = rank_state.follows[role]
        train, home = rank_state.places[followed].train, rank_state.places[role].home
        trains = train is not None and rank in train.mesh.ranks
        needs: list[Need] = [(followed, "train"), (role, "home")]
        rank_state.offloads.want(*(needs if trains else needs[1:]))
        buffers: dict[str, Tensor] = {}
        if trains:
            optimizer = rank_state.optimizers.trained[followed][0].optimizer
            if self.share is not None:
                optimizer.average(self.share)
            buffers[AVERAGED] = optimizer.buffers()[AVERAGED]
        if rank in home.mesh.ranks:
            buffers |= rank_state.roles[role].buffers
        yield from rank_state.moving_by(plan, buffers, f"{role}.follow")


class AnnouncedUpkeep(RankCommand, Protocol):
    """A command that is no call of the flow (`upkeep`); the same for all ranks."""

    @property
    def role(self) -> str:
        """The role whose weights it concerns; empty: all roles."""
        ...

    def to_message(self) -> Message: ...


class Asks(AnnouncedUpkeep, Protocol):
    """Upkeep that every rank answers with a message."""

    @staticmethod
    def result_of(message: Message) -> Any: ...


def name_of(command: AnnouncedUpkeep | InstanceCommand) -> str:
    """The name of a command, for the status file."""
    return f"{command.role} ({command.kind})" if command.role else command.kind


class AnnouncedCall(RankCommand, Protocol):
    """A command to compute a call of the flow, or several calls together."""

    @property
    def role(self) -> str: ...

    @property
    def call(self) -> str: ...

    @property
    def copied(self) -> Mode | None:
        """The mode whose copies of the weights it computes with; None: it computes with the weights of the home."""
        ...

    @property
    def trained(self) -> tuple[str, ...]:
        """Roles whose weights it changes."""
        ...

    def layout(self, rank_state: RankState) -> Layout: ...

    def messages(self, rank_state: RankState) -> dict[int, Message]:
        """Rank → its message, for each rank of the layout but the leader."""
        ...

    @staticmethod
    def result_of(message: Message) -> Any: ...


class Announcer:
    """Sends the leader's commands to ranks, and does the leader's own part of them.

    Args:
        rank_state: the leader's.
        transport: carries commands to the other ranks, and their answers.
        recorder: the leader's.
        status: shows which action the leader is in.
    """

    def __init__(self, rank_state: RankState, transport: Transport, recorder: Recorder, status: StatusFile) -> None:
        self.rank_state = rank_state
        self.transport = transport
        self.recorder = recorder
        self.status = status
        self.fresh = Freshness(rank_state.copies, rank_state.held_copies)
        self._numbers = itertools.count()
        self._together: dict[int, str] = {}
        """Number of a command that this rank and others are in the middle of → its name. The others cannot end it
        alone."""
        self._moves: dict[int, Work[None]] = {}
        """Number of a move that was announced and that this rank has not ended → its work."""
        self._elsewhere: dict[int, tuple[int, ...]] = {}
        """Number of a call that only other ranks score → those ranks."""

    def tell(
        self,
        ranks: Collection[int],
        command: AnnouncedUpkeep | InstanceCommand,
        copies: Collection[Copy] | None = frozenset(),
    ) -> Told:
        """Announce a command to these ranks, which may include the leader.

        Args:
            copies: copies of weights that it needs; None: it moves nothing off or onto the devices.
        """
        return self._tell(ranks, command, name_of(command), command.to_message(), copies)

    def _tell(
        self,
        ranks: Collection[int],
        command: RankCommand | InstanceCommand,
        name: str,
        messages: Message | Mapping[int, Message],
        copies: Collection[Copy] | None,
    ) -> Told:
        if copies is not None:
            self.fresh.told(ranks, copies)
        number = self.send(ranks, messages)
        own = self.rank_state.take(number, command) if LEADER in ranks else None
        return Told(number, name, own, len(ranks) > 1)

    def send(self, ranks: Collection[int], messages: Message | Mapping[int, Message]) -> int:
        """Send a message, the same or one for each rank, to these ranks but the leader; the command's number."""
        number = next(self._numbers)
        for rank in sorted(set(ranks) - {LEADER}):
            message = messages if isinstance(messages, Message) else messages[rank]
            self.transport.send(rank, replace(message, number=number, step=self.recorder.step), message.kind)
        return number

    def ask(self, ranks: Collection[int], command: Asks, what: str) -> list[Any]:
        """Have these ranks, which include the leader, do a command; their answers, in the order of the ranks."""
        told = self.tell(ranks, command)
        assert told.own is not None, f"the leader asks others alone for {what}"
        with self.status.doing(told.name):
            own = self.recorder.drain(told.own)
            others = [
                self.transport.receive([rank], what, WAIT_S, answers={told.number})[1]
                for rank in sorted(set(ranks) - {LEADER})
            ]
        return [own, *map(command.result_of, others)]

    def calling(self, call: AnnouncedCall) -> Work[Any]:
        """Do a call, which is announced with the first `next()`; the result is the trainer's."""
        ranks = call.layout(self.rank_state).mesh.ranks
        with self.status.doing(call.call):
            told = self._announce(call, ranks)
        if told.own is not None:
            return (yield from self._joined(told))
        yield MOVED_ON
        while True:
            if not self.transport.has(ranks[0], told.number):
                yield None
                continue
            with self.status.doing(call.call):
                _, answer = self.transport.receive([ranks[0]], call.call, WAIT_S, answers={told.number})
            if answer.kind != Report.kind:
                break
            yield Done(units=Report.of(answer).count)
        self._elsewhere.pop(told.number, None)
        return call.result_of(answer)

    def _joined(self, told: Told) -> Work[Any]:
        """Do the leader's part of a command, which other ranks may wait for."""
        assert told.own is not None, f"the leader has no part in {told.name}"
        if told.is_joint:
            self._together[told.number] = told.name
        result = yield from self.status.through(told.name, told.own)
        self._together.pop(told.number, None)
        return result

    def do(self, told: Told, role: str = "") -> Any:
        """Do the leader's part of a command in one go, if it has one; the result."""
        return None if told.own is None else self.recorder.drain(self._joined(told), role)

    def _announce(self, call: AnnouncedCall, ranks: Sequence[int]) -> Told:
        for role in call.trained:
            self.fresh.trained(role)
        needed: Collection[Copy] = ()
        if call.copied is not None:
            self.sync_weights(call.role, call.copied)
            needed = self.rank_state.copies_for(call.role, call.copied)
        told = self._tell(ranks, call, call.call, call.messages(self.rank_state), needed)
        if told.own is None and call.copied is not None:
            self._elsewhere[told.number] = tuple(ranks)
        return told

    def sync_weights(self, role: str, mode: Mode | None = None) -> None:
        """`syncing_weights` in one go."""
        self.recorder.drain(self.syncing_weights(role, mode), role)

    def syncing_weights(self, role: str, mode: Mode | None = None) -> Work[None]:
        """Bring a role's weights to the copies that a mode needs, if these are stale and need not keep older weights
        (`RankState.held_copies`). Mode None: to all stale copies that stay on their devices, which publishes new
        weights. The move is announced at once; the leader's part is one action per `next()`."""
        if not (numbers := self.fresh.behind(role, mode)):
            return nothing()
        copies = [self.rank_state.copies[role][number] for number in numbers]
        moved = {(role, number) for number in numbers}
        told = self.tell({rank for copy in copies for rank in copy.ranks}, Move(role, numbers), moved)
        self.fresh.moved(moved)
        if told.own is None:
            return nothing()
        self._moves[told.number] = self._moving(told, role)
        return self._moves[told.number]

    def _moving(self, told: Told, role: str) -> Work[None]:
        yield from self._joined(told)
        del self._moves[told.number]

    def sync_references(self, share: float | None) -> None:
        """Update the weights of roles that follow another role; see `Follow`."""
        places = self.rank_state.places
        for role, followed in self.rank_state.follows.items():
            told = self.tell({*places[followed].ranks, *places[role].ranks}, Follow(role, share))
            self.fresh.trained(role)
            self.do(told, role)

    @contextlib.contextmanager
    def joining(self, action: str) -> Iterator[None]:
        """The context in which this rank does its part of what several ranks do together."""
        number = next(self._numbers)
        self._together[number] = action
        with self.status.doing(action):
            yield
        del self._together[number]

    def end_moves(self) -> str:
        """After an error: end the moves that are under way. Returns what other ranks still wait for, in words that
        follow `since`; empty if nothing."""
        for moves in list(self._moves.values()):
            to_the_end(moves)
        if not self._together:
            return ""
        return f"other ranks wait for this one in {', '.join(f'`{what}`' for what in self._together.values())}"

    def forget(self) -> None:
        """After an error: tell ranks that score alone that nobody waits for their calls."""
        for number, ranks in self._elsewhere.items():
            self.send(ranks, ForgetCall(number).to_message())
        self._elsewhere.clear()
