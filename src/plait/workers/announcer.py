"""What the leader says to the ranks of a run: commands in one order that all ranks see, so that their collectives never
cross; calls, and moves of weights to where calls need them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from plait.layout.mesh import Layout
from plait.schedule.plan import Mode
from plait.schedule.work import MOVED_ON, Done, Work, to_the_end
from plait.workers.messages import Do, Message
from plait.workers.offload_manager import Need
from plait.workers.rank_state import RankState
from plait.workers.ranks import LEADER, WAIT_S
from plait.workers.recorder import Recorder
from plait.workers.status_file import StatusFile
from plait.workers.transport import Transport


class Call(Protocol):
    """What a role is asked to compute, or several together, as a value that travels (`commands`)."""

    @property
    def role(self) -> str: ...

    @property
    def call(self) -> str: ...

    @property
    def copied(self) -> Mode | None:
        """Whose copies of the weights it computes with; None: with the weights themselves."""
        ...

    @property
    def trained(self) -> tuple[str, ...]:
        """Roles whose weights are others afterwards."""
        ...

    @property
    def needs(self) -> tuple[Need, ...]:
        """What must be on the device."""
        ...

    def layout(self, rank_state: RankState) -> Layout: ...

    def run(self, rank_state: RankState) -> Work[Any]:
        """This rank's part of it."""
        ...

    def messages(self, rank_state: RankState) -> dict[int, Message]:
        """For each rank but the leader."""
        ...

    @staticmethod
    def answer(result: Any) -> Message: ...

    @staticmethod
    def result_of(message: Message) -> Any: ...


class Announcer:
    """The leader's word to all ranks.

    Args:
        rank_state: the leader's.
        transport: carries what is said to the other ranks, and their answers.
        recorder: the leader's.
        status: where it is said which action the leader is in.
    """

    def __init__(self, rank_state: RankState, transport: Transport, recorder: Recorder, status: StatusFile) -> None:
        self.rank_state = rank_state
        self.transport = transport
        self.recorder = recorder
        self.status = status
        self._dropped = {
            (role, number)
            for role, copies_of_role in rank_state.copies.items()
            for number, copies in enumerate(copies_of_role)
            if copies.after == "drop"
        }
        """Copies (a role, a number in `RankState.copies`) that leave before a command that does not need them."""
        self.stale = set(self._dropped)
        """Copies without the role's weights as they are: it has been trained since they were moved, or they may have
        been dropped."""
        self._numbers = itertools.count()
        self._together: dict[int, str] = {}
        """What this rank and others are in the middle of, and the others cannot end alone; by number."""
        self._moves: dict[int, Work[None]] = {}
        """That have been announced and that this rank has not ended."""
        self._elsewhere: dict[int, tuple[int, ...]] = {}
        """Calls that score on other ranks alone: number → those ranks."""

    def tell(
        self,
        ranks: Collection[int],
        message: Message | Mapping[int, Message],
        copies: Collection[tuple[str, int]] | None = frozenset(),
    ) -> int:
        """Announce a command to these ranks. The leader may be among them: it does its part itself.

        Args:
            message: the command; or that of each rank but the leader.
            copies: that are needed for it; None: it leaves what is on the devices as it is.

        Returns:
            The number of the command, which every answer to it has.
        """
        if copies is not None:
            told = {(role, n) for role, n in self._dropped if not self._held(role, n).isdisjoint(ranks)}
            self.stale |= told - set(copies)
        number = next(self._numbers)
        for rank in sorted(set(ranks) - {LEADER}):
            mine = message if isinstance(message, Message) else message[rank]
            numbered = Message({**mine.header, "at": self.recorder.step, "number": number}, mine.arrays)
            self.transport.send(rank, numbered, str(mine.header["do"]))
        return number

    def _held(self, role: str, number: int) -> set[int]:
        """Ranks that have some of these copies."""
        return {rank for rank, _ in self.rank_state.copies[role][number].parts}

    def answer(self, rank: int, number: int, what: str) -> Message:
        """The next answer of a rank to the command of this number."""
        return self.transport.receive([rank], what, WAIT_S, answers={number})[1]

    def calling(self, call: Call) -> Work[Any]:
        """A call, which is announced with the first `next()`; its result is that of the trainer."""
        ranks = call.layout(self.rank_state).mesh.ranks
        with self.status.doing(call.call):
            number = self._announce(call, ranks)
        yield MOVED_ON
        if LEADER in ranks:
            result = yield from self.status.through(call.call, call.run(self.rank_state))
            self._together.pop(number, None)
            return result
        while True:
            if not self.transport.has(ranks[0], number):
                yield None
                continue
            with self.status.doing(call.call):
                answer = self.answer(ranks[0], number, call.call)
            if "count" not in answer.header:
                break
            yield Done(units=answer.header["count"])
        self._elsewhere.pop(number, None)
        return call.result_of(answer)

    def _announce(self, call: Call, ranks: Collection[int]) -> int:
        """Returns the number of the command."""
        for role in call.trained:
            self.trained(role)
        if call.copied is None:
            number = self.tell(ranks, call.messages(self.rank_state))
        else:
            self.sync_weights(call.role, call.copied)
            needed = self.rank_state.copies_for(call.role, call.copied)
            number = self.tell(ranks, call.messages(self.rank_state), needed)
        if LEADER in ranks:
            self.rank_state.offloads.want(*call.needs)
            if len(ranks) > 1:
                self._together[number] = call.call
        elif call.copied is not None:
            self._elsewhere[number] = tuple(ranks)
        return number

    def trained(self, role: str) -> None:
        """What changes the weights of the role has been announced."""
        self.stale |= {(role, number) for number in range(len(self.rank_state.copies[role]))}

    def sync_weights(self, role: str, mode: Mode | None = None) -> None:
        """`syncing_weights` in one go; None publishes the weights to what generates."""
        self.recorder.drain(self.syncing_weights(role, mode), role)

    def syncing_weights(self, role: str, mode: Mode | None = None) -> Work[None]:
        """Have a role's weights brought to where they are needed for a mode, if they are not there as they are, and may
        be (`RankState.held_copies`); None: to all copies that stay on their devices. It is announced at once; the
        leader's part is an action per `next()`."""
        copies, numbers = self.rank_state.copies[role], self._behind(role, mode)
        movers = {rank for number in numbers for rank in copies[number].ranks}
        moved = {(role, number) for number in numbers}
        if moved:
            self.tell(movers, Message({"do": Do.MOVE, "role": role, "numbers": numbers}), moved)
            self.stale -= moved
        place = next(self._numbers)
        self._moves[place] = self._moving(place, role, numbers if LEADER in movers else [])
        return self._moves[place]

    def sync_references(self, share: float | None) -> None:
        """Bring the weights of roles that follow another towards those of that role; see `RankState.following`."""
        places = self.rank_state.places
        for role, followed in self.rank_state.follows.items():
            ranks = {*places[followed].ranks, *places[role].ranks}
            self.tell(ranks, Message({"do": Do.FOLLOW, "role": role, "share": share}))
            self.trained(role)
            if LEADER in ranks:
                with self.joining(f"{role}.follow"):
                    self.recorder.drain(self.rank_state.following(role, share), role)

    def _moving(self, place: int, role: str, numbers: Sequence[int]) -> Work[None]:
        if numbers:
            self._together[place] = name = f"{role}.weights (move)"
            yield from self.status.through(name, self.rank_state.moving_all(role, numbers))
            del self._together[place]
        del self._moves[place]

    def is_fresh(self, role: str, mode: Mode) -> bool:
        """Whether a role's weights are, as they are, where they are needed for a mode."""
        return not self._behind(role, mode)

    def _behind(self, role: str, mode: Mode | None) -> list[int]:
        """Numbers of the copies that `sync_weights` has to bring."""
        held = () if mode is None else self.rank_state.held_copies[role]
        return [
            number
            for number, copies in enumerate(self.rank_state.copies[role])
            if (role, number) in self.stale
            and number not in held
            and (copies.after == "keep" if mode is None else mode in copies.modes)
        ]

    @contextlib.contextmanager
    def joining(self, action: str) -> Iterator[None]:
        """Within it, do this rank's part of what several do together."""
        number = next(self._numbers)
        self._together[number] = action
        with self.status.doing(action):
            yield
        del self._together[number]

    def end_moves(self) -> str:
        """After an error: moves that are under way end. What other ranks wait for then, in words that follow `since`;
        else nothing."""
        for moves in list(self._moves.values()):
            to_the_end(moves)
        if not self._together:
            return ""
        return f"other ranks wait for this one in {', '.join(f'`{what}`' for what in self._together.values())}"

    def forget(self) -> None:
        """After an error: nobody waits for the calls that score elsewhere."""
        for number, ranks in self._elsewhere.items():
            self.tell(ranks, Message({"do": Do.FORGET, "role": None, "call": number}), None)
        self._elsewhere.clear()
