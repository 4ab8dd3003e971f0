"""Schedules: the ordered actions of every rank, as a value with a text form and a file form.

A row is the order in which a rank issues its actions. Each lane of the rank (compute, send, recv) runs its own in that
order, one at a time; an action starts when its lane is free and everything that it waits for has ended. Receives are
posted ahead, so they end when the matching send has, in whatever order (eager receives).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from plait.errors import DataError
from plait.file_form import FileForm
from plait.output import Filed
from plait.schedule.action import Action, Kind, action_id, names_waits, parse_action


@dataclass(frozen=True, slots=True)
class Schedule(Filed):
    """`rows[rank]` are the actions of that rank, in order."""

    rows: tuple[tuple[Action, ...], ...]
    name: str = ""

    form: ClassVar = FileForm("schedule")

    @property
    def num_ranks(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Action]:
        return (action for row in self.rows for action in row)

    def __len__(self) -> int:
        return sum(len(row) for row in self.rows)

    def ids(self) -> tuple[tuple[str, ...], ...]:
        """The ids of each rank's actions, in order: what a `diff` of two schedules compares."""
        return tuple(tuple(action.id for action in row) for row in self.rows)

    def to_text(self) -> str:
        """One line per rank. Waits are written only where they are not the pipeline's own (`natural_waits`)."""
        present = {action.id for action in self}
        lines = []
        for rank, row in enumerate(self.rows):
            words = [action.text(waits=action.waits != natural_waits(action, present)) for action in row]
            lines.append(" ".join([f"rank {rank}:", *words]))
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """The file form, with a version; its rows are those of the text form."""
        rows = [line.split()[2:] for line in self.to_text().splitlines()]
        record = ",\n".join(json.dumps(row) for row in rows)
        head = f'"format": "{self.form.format}", "version": {self.form.version}, "name": {json.dumps(self.name)}'
        return f'{{{head}, "rows": [\n{record}\n]}}\n'

    @classmethod
    def from_json(cls, text: str, name: str = "schedule") -> Schedule:
        """Read the file form; `name` is for messages. Raises `DataError` when the text is no such schedule."""
        record = cls.form.parse(text, name)
        rows = record.get("rows")
        if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
            raise DataError(f"{name}: expected `rows`, a list of actions for each rank")
        try:
            return _from_words(rows, str(record.get("name", "")))
        except (DataError, TypeError) as error:
            raise DataError(f"{name}: {error}") from error


def parse(text: str, name: str = "") -> Schedule:
    """Read the text form. Waits that a line does not name are the pipeline's own. Raises `DataError`."""
    rows = []
    for rank, line in enumerate(text.strip().splitlines()):
        head, colon, rest = line.partition(":")
        if not colon or head.split() != ["rank", str(rank)]:
            raise DataError(f"line {rank + 1} of the schedule: expected 'rank {rank}: …', found {line[:40]!r}")
        rows.append(rest.split())
    return _from_words(rows, name)


def natural_waits(action: Action, present: set[str]) -> tuple[str, ...]:
    """What a pipeline action waits for when nothing else is said, given the ids of all actions of the schedule.

    A forward waits for the stage before it, a backward for the stage after it (or, on the last stage, for its own
    forward); where the schedule holds explicit sends and receives, each waits for its link of that chain.
    """
    near = lambda kind, step: action_id(
        kind, action.model, action.copy, action.stage + step, action.index, action.round
    )
    match action.kind:
        case Kind.FORWARD:
            chain = (near(Kind.RECV_FORWARD, 0), *([near(Kind.FORWARD, -1)] if action.stage else []))
        case Kind.BACKWARD:
            chain = (near(Kind.RECV_BACKWARD, 0), near(Kind.BACKWARD, 1), near(Kind.FORWARD, 0))
        case Kind.SEND_FORWARD:
            chain = (near(Kind.FORWARD, 0),)
        case Kind.SEND_BACKWARD:
            chain = (near(Kind.BACKWARD, 0),)
        case Kind.RECV_FORWARD if action.stage:
            chain = (near(Kind.SEND_FORWARD, -1),)
        case Kind.RECV_BACKWARD:
            chain = (near(Kind.SEND_BACKWARD, 1),)
        case _:
            chain = ()
    return next(((link,) for link in chain if link in present), ())


def with_transfers(schedule: Schedule, bytes_of: dict[str, int] | None = None) -> Schedule:
    """The same pipeline schedule with a SEND and a RECV for every output that crosses ranks.

    bytes_of: bytes of the message that the forward or backward with this id sends; 0 where it names none

    A send stands right behind the action that produces its message, a receive right before the action that uses it.
    An executor posts receives ahead, so this is the latest place of a receive, not its only one.
    """
    sizes = bytes_of or {}
    rank_of = {action.id: action.rank for action in schedule}
    consumers: dict[str, list[Action]] = {}
    for action in schedule:
        for wait in action.waits:
            consumers.setdefault(wait, []).append(action)
    rows = []
    for row in schedule.rows:
        out: list[Action] = []
        for action in row:
            crossing = [wait for wait in action.waits if rank_of.get(wait, action.rank) != action.rank]
            if action.kind in _RECEIVED and crossing:
                receive = replace(action, kind=_RECEIVED[action.kind], bytes=sizes.get(crossing[0], 0), samples=())
                sender = replace(receive, kind=_SENT[action.kind], stage=action.stage + _FROM[action.kind])
                out.append(replace(receive, waits=(sender.id,)))
                action = replace(action, waits=(receive.id,))
            out.append(action)
            away = [user for user in consumers.get(action.id, ()) if user.rank != action.rank]
            if action.kind in _SENT and away:
                size = sizes.get(action.id, 0)
                out.append(replace(action, kind=_SENT[action.kind], waits=(action.id,), bytes=size, samples=()))
        rows.append(tuple(out))
    return replace(schedule, rows=tuple(rows))


_SENT = {Kind.FORWARD: Kind.SEND_FORWARD, Kind.BACKWARD: Kind.SEND_BACKWARD}
_RECEIVED = {Kind.FORWARD: Kind.RECV_FORWARD, Kind.BACKWARD: Kind.RECV_BACKWARD}
_FROM = {Kind.FORWARD: -1, Kind.BACKWARD: 1}


def _from_words(rows: Iterable[Iterable[str]], name: str) -> Schedule:
    words = [list(row) for row in rows]
    actions = [[parse_action(word, rank) for word in row] for rank, row in enumerate(words)]
    present = {action.id for row in actions for action in row}
    return Schedule(
        tuple(
            tuple(
                action if names_waits(word) else replace(action, waits=natural_waits(action, present))
                for action, word in zip(row, texts, strict=True)
            )
            for row, texts in zip(actions, words, strict=True)
        ),
        name,
    )
