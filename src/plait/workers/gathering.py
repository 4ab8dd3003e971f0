"""Unfinished samples of a role that go on in other instances, and prompts that were computed in others than their
samples are drawn in: as the leader says it, and who does it on a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from plait.data.records import Prompt
from plait.policy.step import PROMPT, Key
from plait.workers.messages import Message
from plait.workers.wire_forms import Record

Pair = tuple[int, int]
"""Numbers of two instances: source and target."""


class Stage(StrEnum):
    """What of a move is done; the first three only where the bulk goes ahead."""

    HERE = "here"
    """Targets say what they have of the prompts."""
    GIVE = "give"
    """Sources begin to send, and say what; later, that it is through."""
    TAKE = "take"
    """Targets begin to receive that."""
    REST = "rest"
    """What is left travels, and the samples go on in the targets."""
    ENTER = "enter"
    """In place of REST, of prompts, which leave with GIVE: their samples begin in the targets."""


@dataclass(frozen=True)
class Gathering(Record):
    """Samples that leave some instances for others.

    pairs:     the samples that move, or prompts (PROMPT in place of an index)
    numbers:   prompt → the command that asked for its samples, which they are delivered under
    recompute: those whose keys and values are computed again in the target
    stage:     what is done now
    move:      a number that both sides know the move by
    prompts:   HERE: of the samples
    said:      GIVE, TAKE: what the other instance of each pair has said
    """

    pairs: Mapping[Pair, Sequence[Key]]
    numbers: Mapping[int, int]
    recompute: frozenset[Key] = frozenset()
    stage: Stage = Stage.REST
    move: int = 0
    prompts: Sequence[Prompt] = ()
    said: Mapping[Pair, Message] = field(default_factory=dict)

    @property
    def instances(self) -> frozenset[int]:
        """All that have a part in the move."""
        return self.sources | self.targets

    @property
    def is_of_prompts(self) -> bool:
        """Whether prompts move; their samples have not begun."""
        return any(index == PROMPT for keys in self.pairs.values() for _, index in keys)

    @property
    def sources(self) -> frozenset[int]:
        return frozenset(source for source, _ in self.pairs)

    @property
    def targets(self) -> frozenset[int]:
        return frozenset(target for _, target in self.pairs)

    @property
    def concerned(self) -> frozenset[int]:
        """Instances that do this stage."""
        match self.stage:
            case Stage.HERE | Stage.TAKE:
                return self.targets
            case Stage.GIVE:
                return self.sources
            case Stage.REST | Stage.ENTER:
                return self.instances


@dataclass(frozen=True)
class Said(Record):
    """What an instance says of each pair in a stage: HERE, GIVE."""

    stage: Stage
    of_pairs: Mapping[Pair, Message]

    kind: ClassVar[str] = "said"


@dataclass(frozen=True)
class Through(Record):
    """All that an instance has given ahead is on the other side; of prompts the target says it, of what it took."""

    kind: ClassVar[str] = "through"


@dataclass(frozen=True)
class Left(Record):
    """REST: the samples that an instance has given away. Those that had ended, or had not begun, stay."""

    keys: Sequence[Key]

    kind: ClassVar[str] = "left"


@dataclass(frozen=True)
class Computed(Record):
    """Prompts that an instance has computed for others before it takes up another command, and holds until they are
    given away."""

    uids: Sequence[int]

    kind: ClassVar[str] = "computed"


MoveWord = Said | Through | Left | Computed
"""What an instance says of a move, and of what is to be moved."""
