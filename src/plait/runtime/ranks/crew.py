"""The leader's side of a run on several ranks: trainers and engines as the one-process run has them.

A call is announced to the ranks of its layout, and the leader runs its own part, if it has one, an action at a time.
All ranks see the leader's one order of announcements, so their collectives never cross.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.checkpoint.store import FileDigest, digest_of
from plait.errors import RunError
from plait.models.finite import Broken
from plait.runtime.ranks.board import Board
from plait.runtime.ranks.chores import loading_part, moving_part, saving_part
from plait.runtime.ranks.commands import LEADER, Call, Do, TrainCall
from plait.runtime.ranks.crew_calls import CrewTrainer
from plait.runtime.ranks.crew_engine import CrewEngine
from plait.runtime.ranks.mail import Mail
from plait.runtime.ranks.optimizer_state import refuse_broken
from plait.runtime.ranks.parcels import Parcel
from plait.runtime.ranks.parts import WAIT_S, Parts
from plait.runtime.ranks.residence import Need
from plait.runtime.recorder import Recorder
from plait.schedule.plan import Mode
from plait.schedule.timeline import Span
from plait.schedule.work import MOVED_ON, Done, Result, Work, to_the_end


class Crew:
    """All ranks of a run, as the leader sees them.

    Args:
        parts: the leader's own.
        recorder: of the leader.
    """

    def __init__(self, parts: Parts, mail: Mail, num_ranks: int, recorder: Recorder, board: Board) -> None:
        self.parts = parts
        self.mail = mail
        self.recorder = recorder
        self.board = board
        self.others = tuple(range(1, num_ranks))
        self._dropped = {
            (role, number)
            for role, found in parts.copies.items()
            for number, copies in enumerate(found)
            if copies.after == "drop"
        }
        """Copies (a role, a number in `Parts.copies`) that leave before a command that does not need them."""
        self._stale = set(self._dropped)
        """Copies without the role's weights as they are: it has been trained since they were moved, or they may have
        been dropped."""
        self._numbers = itertools.count()
        self._engines: dict[str, CrewEngine] = {}
        self._counted = (0, 0)
        self.together: dict[int, str] = {}
        """What this rank and others are in the middle of, and the others cannot end alone; by number."""
        self._moves: dict[int, Work[None]] = {}
        """That have been announced and that this rank has not ended."""
        self.elsewhere: dict[int, tuple[int, ...]] = {}
        """Calls that score on other ranks alone: number → those ranks."""
        parts.residence.recorder = recorder

    def tell(
        self,
        ranks: Collection[int],
        parcel: Parcel | Mapping[int, Parcel],
        copies: Collection[tuple[str, int]] | None = frozenset(),
    ) -> int:
        """Announce a command to these ranks. The leader may be among them: it does its part itself.

        Args:
            parcel: the command; or that of each rank but the leader.
            copies: that are needed for it; None: it leaves what is on the devices as it is.

        Returns:
            The number of the command, which every answer to it has.
        """
        if copies is not None:
            told = {(role, n) for role, n in self._dropped if not self._held(role, n).isdisjoint(ranks)}
            self._stale |= told - set(copies)
        number = next(self._numbers)
        for rank in sorted(set(ranks) - {LEADER}):
            mine = parcel if isinstance(parcel, Parcel) else parcel[rank]
            message = Parcel({**mine.header, "at": self.recorder.step, "number": number}, mine.arrays)
            self.mail.send(rank, message, str(mine.header["do"]))
        return number

    def _held(self, role: str, number: int) -> set[int]:
        """Ranks that have some of these copies."""
        return {rank for rank, _ in self.parts.copies[role][number].parts}

    def answer(self, rank: int, number: int, what: str) -> Parcel:
        """The next answer of a rank to the command of this number."""
        return self.mail.receive([rank], what, WAIT_S, answers={number})[1]

    def calling(self, call: Call) -> Work[Any]:
        """A call, which is announced with the first `next()`; its result is that of the trainer."""
        ranks = call.layout(self.parts).mesh.ranks
        with self.board.doing(call.call):
            number = self._announce(call, ranks)
        yield MOVED_ON
        if LEADER in ranks:
            result = yield from self.board.through(call.call, call.run(self.parts))
            self.together.pop(number, None)
            return result
        while True:
            if not self.mail.has(ranks[0], number):
                yield None
                continue
            with self.board.doing(call.call):
                answer = self.answer(ranks[0], number, call.call)
            if "count" not in answer.header:
                break
            yield Done(units=answer.header["count"])
        self.elsewhere.pop(number, None)
        return call.result_of(answer)

    def finish(self, work: Work[Result]) -> Result:
        """Do all of a work, beside which nothing else is to be done; its result.

        Raises:
            RunError: nothing has come for WAIT_S.
        """
        while True:
            try:
                done = next(work)
            except StopIteration as end:
                return end.value
            if done is None and not self.mail.wait(WAIT_S, "other ranks"):
                raise RunError(f"rank {LEADER} expected a sign from other ranks within {WAIT_S:g} s")

    def _announce(self, call: Call, ranks: Collection[int]) -> int:
        """Returns the number of the command."""
        if isinstance(call, TrainCall):
            if call.step is not None:
                self.trained(call.role)
            number = self.tell(ranks, call.parcels(self.parts))
        else:
            self.freshen(call.role, "score")
            number = self.tell(ranks, call.parcels(self.parts), self.copies(call.role, "score"))
        if LEADER in ranks:
            self.parts.residence.want(call.need)
            if len(ranks) > 1:
                self.together[number] = call.call
        elif not isinstance(call, TrainCall):
            self.elsewhere[number] = tuple(ranks)
        return number

    def trained(self, role: str) -> None:
        """A call that trains the role has been announced."""
        self._stale |= {(role, number) for number in range(len(self.parts.copies[role]))}

    def copies(self, role: str, mode: Mode) -> frozenset[tuple[str, int]]:
        """Those that are needed for a role's calls of a mode."""
        return frozenset((role, n) for n, copies in enumerate(self.parts.copies[role]) if mode in copies.modes)

    def freshen(self, role: str, mode: Mode | None = None) -> None:
        """`freshening` in one go."""
        self.recorder.drain(self.freshening(role, mode), role)

    def freshening(self, role: str, mode: Mode | None = None) -> Work[None]:
        """Have a role's weights brought to where they are needed for a mode, if they are not there as they are; None:
        to all copies that stay on their devices. It is announced at once; the leader's part is an action per `next()`.
        """
        found, numbers = self.parts.copies[role], self._behind(role, mode)
        movers = {rank for number in numbers for rank in found[number].ranks}
        moved = {(role, number) for number in numbers}
        if moved:
            self.tell(movers, Parcel({"do": Do.MOVE, "role": role, "numbers": numbers}), moved)
            self._stale -= moved
        place = next(self._numbers)
        self._moves[place] = self._moving(place, role, numbers if LEADER in movers else [])
        return self._moves[place]

    def _moving(self, place: int, role: str, numbers: Sequence[int]) -> Work[None]:
        if numbers:
            self.together[place] = name = f"{role}.weights (move)"
            yield from self.board.through(name, moving_part(self.parts, role, numbers))
            del self.together[place]
        del self._moves[place]

    def is_fresh(self, role: str, mode: Mode) -> bool:
        """Whether a role's weights are, as they are, where they are needed for a mode."""
        return not self._behind(role, mode)

    def _behind(self, role: str, mode: Mode | None) -> list[int]:
        """Numbers of the copies that `freshen` has to bring."""
        return [
            number
            for number, copies in enumerate(self.parts.copies[role])
            if (role, number) in self._stale and (copies.after == "keep" if mode is None else mode in copies.modes)
        ]

    def now(self, role: str, weights: Tensor) -> Tensor | None:
        """The values of weights that the leader has of a role, wherever they are; None: not as they are by now."""
        is_home = LEADER in self.parts.places[role].home.mesh.ranks
        if not is_home and any((role, number) in self._stale for number in range(len(self.parts.copies[role]))):
            return None
        return self.parts.residence.now(weights)

    @contextlib.contextmanager
    def holding(self) -> Iterator[bool]:
        """Within it the leader's models can be computed with, one after another; whether all of them can."""
        stale = {copies for role, n in self._stale if (copies := self.parts.copies[role][n]).after != "keep"}
        if any(rank == LEADER for copies in stale for rank, _ in copies.parts):
            yield False
            return
        needs: list[Need] = [(role, what) for role in self.parts.roles for what in ("home", "score", "decode")]
        with self.parts.residence.holding(*needs) as there:
            yield there

    def spans(self) -> list[Span]:
        """What the other ranks recorded since the last time, on the leader's clock. What may leave the devices has."""
        self.parts.residence.want()
        number = self.tell((LEADER, *self.others), Parcel({"do": Do.SPANS, "zero": self.recorder.zero_s}))
        found: list[Span] = []
        with self.board.doing("timeline"):
            for rank in self.others:
                found += [Span(*values) for values in self.answer(rank, number, "its timeline").header["spans"]]
        return found

    def row_traffic(self) -> dict[str, float]:
        """Metrics: bytes of rows that this rank has sent and received since the last time; none where it is alone."""
        if not self.others:
            return {}
        now = self.mail.sent_bytes, self.mail.received_bytes
        sent, received = (after - before for after, before in zip(now, self._counted, strict=True))
        self._counted = now
        return {"perf/rows_sent_bytes": sent, "perf/rows_received_bytes": received}

    def save(self, folder: Path) -> tuple[dict[str, FileDigest], dict[str, Any]]:
        """Have each rank write its part of the optimizers' state to an empty folder (`checkpoint.store.WriteParts`).

        Returns:
            Name of a file → its digest; the counts of all roles, under `counts`.

        Raises:
            RunError: a file could not be written, or what a rank has is not finite.
        """
        number = self.tell((LEADER, *self.others), Parcel({"do": Do.SAVE, "folder": str(folder)}))
        with self.board.doing("save"):
            counts, found = self.recorder.drain(saving_part(self.parts, folder))
            for rank in self.others:
                header = self.answer(rank, number, "its part of the checkpoint").header
                counts |= header["counts"]
                found += [Broken(*values) for values in header["broken"]]
        refuse_broken(found)
        return {path.name: digest_of(path) for path in sorted(folder.iterdir())}, {"counts": counts}

    def load(self, folder: Path, counts: Mapping[str, Mapping[str, int]] | None, threads: int) -> None:
        """Have each rank read its part from a checkpoint of any plan, and bring all weights to where they are used."""
        header = {"do": Do.LOAD, "folder": str(folder), "counts": counts, "threads": threads}
        self.tell((LEADER, *self.others), Parcel(header))
        with self.joining("load"):
            self.recorder.drain(loading_part(self.parts, folder, counts))
        for role, place in self.parts.places.items():
            if place.train is not None:
                self.trained(role)
                self.freshen(role)

    def gather(self, role: str) -> Any:
        """The whole model of a role with the weights as they are: the leader's own if it has that, else a new one."""
        self.tell(self.parts.places[role].home.mesh.ranks, Parcel({"do": Do.GATHER, "role": role}))
        with self.joining(f"{role}.weights (gather)"):
            return self.parts.gather(role)

    @contextlib.contextmanager
    def joining(self, action: str) -> Iterator[None]:
        """Within it, do this rank's part of what several do together."""
        number = next(self._numbers)
        self.together[number] = action
        with self.board.doing(action):
            yield
        del self.together[number]

    def give_up(self) -> str:
        """After an error: what is under way is forgotten, or ends by itself, so that commands are served again.

        Returns:
            Why they will not be, in words that follow `since`; else nothing.
        """
        for moves in list(self._moves.values()):
            to_the_end(moves)
        if self.together:
            return f"other ranks wait for this one in {', '.join(f'`{what}`' for what in self.together.values())}"
        for engine in self._engines.values():
            engine.give_up()
        for number, ranks in self.elsewhere.items():
            self.tell(ranks, Parcel({"do": Do.FORGET, "role": None, "call": number}), None)
        self.elsewhere.clear()
        return ""

    def engine(self, role: str) -> CrewEngine:
        """That of the role: one for all calls."""
        return self._engines.setdefault(role, CrewEngine(self, role))

    def trainer(self, role: str, max_positions: int) -> CrewTrainer:
        return CrewTrainer(self, role, max_positions)

    def close(self) -> None:
        """Let the other ranks go, whatever they are doing for nobody."""
        self.give_up()
        self.tell(self.others, Parcel({"do": Do.END}))
