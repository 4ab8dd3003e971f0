"""What the leader and other ranks tell each other while a call runs, each a record: requests and commands to an
instance that generates, what that delivers, and reports of calls that the leader has no part in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, get_args

from plait.data.records import Prompt, Sample
from plait.generation.request import Request
from plait.policy.decode_ring import StageUse
from plait.policy.step import Key
from plait.schedule.work import Work
from plait.speculation.counts import Counts
from plait.workers.gathering import Gathering, MoveWord
from plait.workers.messages import Message
from plait.workers.wire_forms import Record

TELL_STEPS = 16
"""After so many steps in which no sample ended, an instance tells the lengths of its samples."""


@dataclass(frozen=True)
class Generate(Record):
    """Requests for the instance of the rank.

    call:    that asks, for records: a rollout's, or an evaluation
    weights: number of the weights that are asked (`Freshness.weights_number`)
    """

    role: str
    call: str
    requests: Sequence[Request]
    weights: int

    kind: ClassVar[str] = "generate"


@dataclass(frozen=True)
class Migrate(Record):
    """Samples of a role go on in other instances than those that began with them; `weights` as of `Generate`."""

    role: str
    gathering: Gathering
    weights: int

    kind: ClassVar[str] = "migrate"


@dataclass(frozen=True)
class Halt(Record):
    """All samples of a role stop as they are, and are delivered unfinished; `parks` as of `Engine.halt`."""

    role: str
    parks: bool

    kind: ClassVar[str] = "halt"


@dataclass(frozen=True)
class Forget(Record):
    """Nobody waits any longer for the samples of a role that were asked for."""

    role: str

    kind: ClassVar[str] = "forget"


InstanceCommand = Generate | Migrate | Halt | Forget
"""What an instance is told."""


class Listener(Protocol):
    """This rank as a member of an instance (`lockstep_engine.LockstepEngine`)."""

    def hear(self, number: int, word: InstanceCommand) -> None:
        """A command of this number, with which a later step begins."""
        ...

    def update_weights(self, version: int) -> None:
        """The weights have changed while nothing is in flight."""
        ...

    def end_turns(self) -> None:
        """Samples that have ended do not go on."""
        ...

    def take_use(self) -> StageUse:
        """How busy this rank was in its steps, since somebody last took it."""
        ...


@dataclass(frozen=True)
class Delivered(Record):
    """Samples that have ended, texts included.

    said:        tokens that others have by now
    speculation: how that of the engine went so far; None: it drafts nothing
    """

    samples: Sequence[Sample]
    said: Mapping[Key, int]
    speculation: Counts | None = None

    kind: ClassVar[str] = "samples"

    def as_asked(self, prompts: Mapping[int, Prompt]) -> list[Sample]:
        """The samples with these prompts, by uid: what has come from elsewhere has neither their text nor their
        columns."""
        return [replace(sample, prompt=prompts[sample.prompt.uid]) for sample in self.samples]


Answer = Delivered | MoveWord
"""What an instance says to the leader, each of a command."""
_ANSWERS: Mapping[str, type[Answer]] = {answer.kind: answer for answer in get_args(Answer)}


def answer_of(message: Message) -> Answer:
    """What its message says."""
    return _ANSWERS[message.kind].of(message)


@dataclass(frozen=True)
class ForgetCall(Record):
    """Nobody waits any longer for the call of a command of this number: ranks that have it to themselves end it."""

    call: int

    kind: ClassVar[str] = "forget call"


@dataclass(frozen=True)
class Report(Record):
    """A call that the leader has no part in has gone on by so many actions."""

    count: int

    kind: ClassVar[str] = "report"


@dataclass(frozen=True)
class Told:
    """A command that ranks have been told, by its number, which every answer to it has.

    own:      the leader's part; None: it has none
    is_joint: whether others have one
    """

    number: int
    name: str
    own: Work[Any] | None
    is_joint: bool
