"""An engine whose every step is said beforehand, for tests of what drives engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plait.data.records import Sample
from plait.generation.request import Request
from plait.policy.step import Key
from plait.schedule.work import Done


@dataclass
class ScriptedEngine:
    """What of `engines.GenerationEngine` the loop and who asks it need.

    script: the samples that each step finishes; None: it is not ready for one
    """

    script: list[Sequence[Sample] | None]
    steps: list[str] = field(default_factory=list)
    """Calls that stepped it."""
    asked: list[Request] = field(default_factory=list)
    halts: list[int] = field(default_factory=list)
    """Steps before each halt."""
    said: Mapping[Key, int] = field(default_factory=dict)
    ended_turns: int = 0
    """How often it was told that no sample goes on."""

    @property
    def has_work(self) -> bool:
        return bool(self.script)

    @property
    def ready(self) -> bool:
        if self.script[0] is None:
            del self.script[0]
            return False
        return True

    def add(self, request: Request) -> None:
        self.asked.append(request)

    def advance(self, call: str) -> tuple[Done, list[Sample]]:
        self.steps.append(call)
        finished = list(self.script.pop(0) or ())
        return Done(f"{call}/decode", "DECODE", units=len(finished)), finished

    def halt(self, *, parks: bool) -> None:
        self.halts.append(len(self.steps))

    def end_turns(self) -> None:
        self.ended_turns += 1
