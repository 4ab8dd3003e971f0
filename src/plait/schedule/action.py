"""Actions: the smallest things scheduled, each with a text form that parses back.

The id of an action is short and stable, the same in a schedule, in a simulated and in a measured timeline:

    2F0               stage 2 runs the forward of micro-batch 0
    critic/1:0B15     copy 1 of the critic, stage 0, backward of micro-batch 15
    actor/3:0DECODE17 instance 3 of the actor, decode step 17
    actor:2DECODE3.17 stage 2 of a decode ring: group 3, token 17
    actor:0STEP       optimizer step

The full text adds, in this order, the sample set, what the action waits for, and its bytes, each only where there is
one: `actor:1F0{0-3,8}<actor:0F0#4096`. Several waits are joined by `&`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from plait.errors import DataError


class Kind(StrEnum):
    """What an action does; the value is its text."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    REDUCE = "REDUCE"
    STEP = "STEP"
    PREFILL = "PREFILL"
    DECODE = "DECODE"
    SCORE = "SCORE"
    MOVE = "MOVE"

    @property
    def lane(self) -> str:
        """The resource of a rank that the action keeps busy: `compute`, `send` or `recv`."""
        match self:
            case Kind.SEND_FORWARD | Kind.SEND_BACKWARD | Kind.MOVE:
                return "send"
            case Kind.RECV_FORWARD | Kind.RECV_BACKWARD:
                return "recv"
            case _:
                return "compute"


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that one rank does.

    kind:    what is done
    model:   role of the model, empty where there is only one
    copy:    which of several equal copies of the model: a pipeline of a fused schedule, a dp replica, an instance
    stage:   pipeline stage, 0 where the model is not cut
    index:   micro-batch, group in flight, or the running number of a step; None for an action without one
    round:   within a group in flight, which token; None elsewhere
    rank:    the rank (or tensor-parallel group that acts as one) that runs it
    samples: ids of the samples it works on, where they are known in advance
    waits:   ids of the actions that must have ended before it starts, besides those ahead of it in its lane
    bytes:   bytes that it moves between ranks, 0 where it moves none or nobody has said
    """

    kind: Kind
    model: str = ""
    copy: int = 0
    stage: int = 0
    index: int | None = None
    round: int | None = None
    rank: int = 0
    samples: tuple[int, ...] = ()
    waits: tuple[str, ...] = ()
    bytes: int = 0

    @property
    def id(self) -> str:
        """The short text that names the action."""
        return action_id(self.kind, self.model, self.copy, self.stage, self.index, self.round)

    def text(self, *, waits: bool = True) -> str:
        """The full text; without `waits` where they go without saying."""
        parts = [self.id]
        if self.samples:
            parts.append("{" + format_ids(self.samples) + "}")
        if waits:
            parts.append("<" + "&".join(self.waits))
        if self.bytes:
            parts.append(f"#{self.bytes}")
        return "".join(parts)


def action_id(kind: Kind, model: str, copy: int, stage: int, index: int | None, round: int | None = None) -> str:
    """The id of the action with these properties (`Action.id` without building the action)."""
    prefix = "" if not model and not copy else f"{model}/{copy}:" if copy else f"{model}:"
    suffix = ("" if index is None else str(index)) + ("" if round is None else f".{round}")
    return f"{prefix}{stage}{kind.value}{suffix}"


MOST_SAMPLES = 1 << 20
"""The most samples of one action."""

_KINDS = "|".join(sorted((kind.value for kind in Kind), key=len, reverse=True))
_COUNT = r"[0-9]{1,18}"
_MODEL = rf"(?:(?P<model>[A-Za-z_][\w-]*)?(?:/(?P<copy>{_COUNT}))?:)?"
_ID = rf"{_MODEL}(?P<stage>{_COUNT})(?P<kind>{_KINDS})(?P<index>{_COUNT})?(?:\.(?P<round>{_COUNT}))?"
_TEXT = re.compile(rf"(?P<id>{_ID})(?:\{{(?P<samples>[\d,-]+)\}})?(?P<waits><[^#\s]*)?(?:#(?P<bytes>{_COUNT}))?")


def parse_action(text: str, rank: int = 0) -> Action:
    """Read the text of an action. Raises `DataError` with the text when it is none.

    An action whose text names no waits gets none; `schedule.schedule.parse` fills in those that go without saying.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise DataError(f"expected an action such as actor:2F0, found {text!r:.80}")
    number = lambda name: None if match[name] is None else int(match[name])
    waits = match["waits"] or "<"
    action = Action(
        Kind(match["kind"]),
        match["model"] or "",
        number("copy") or 0,
        int(match["stage"]),
        number("index"),
        number("round"),
        rank,
        parse_ids(match["samples"]) if match["samples"] else (),
        tuple(waits[1:].split("&")) if waits != "<" else (),
        number("bytes") or 0,
    )
    if action.id != match["id"]:
        raise DataError(f"expected an action in its shortest form, {action.id}, found {match['id']}")
    return action


def names_waits(text: str) -> bool:
    """Whether the text of an action says what it waits for (possibly nothing: `1F0<`)."""
    return "<" in text


def format_ids(ids: Iterable[int]) -> str:
    """Sample ids in their order, runs shortened: (0, 1, 2, 3, 8) → `0-3,8`."""
    runs: list[list[int]] = []
    for number in ids:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def parse_ids(text: str) -> tuple[int, ...]:
    """The inverse of `format_ids`. Raises `DataError`."""
    ids: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise DataError(f"expected sample ids such as 0-3,8, found {text!r}")
        numbers = (first, last or first)
        if max(map(len, numbers)) > 18 or int(numbers[1]) - int(numbers[0]) >= MOST_SAMPLES - len(ids):
            raise DataError(f"expected at most {MOST_SAMPLES:,} sample ids of at most 18 digits, found {text[:80]!r}")
        ids.extend(range(int(first), int(last or first) + 1))
    return tuple(ids)
