"""What of a rank's buffers is on its device: brought back before the call that needs it, gone before one that does not.

So calls that follow each other on the same part of a model move nothing, and at the end of a step all has left that may
leave.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from plait.reallocation.mover import Moved
from plait.reallocation.offload import HostMemory
from plait.runtime.recorder import Recorder
from plait.schedule.plan import After

Need = tuple[str, Literal["train", "score", "decode", "home"]]
"""A role and a call of it; `home`: the role's own weights alone, without optimizer state."""


@dataclass(frozen=True, eq=False)
class Unit:
    """Buffers that come and go together."""

    memory: HostMemory
    after: After
    """Offload or drop."""
    role: str
    """For records; of several that share it the first."""


class Residence:
    """The buffers of one rank that do not stay on its device.

    Args:
        needs: what each call computes with.
    """

    def __init__(self, needs: Mapping[Need, Sequence[Unit]] | None = None) -> None:
        self._needs = dict(needs or {})
        self.units: tuple[Unit, ...] = tuple(dict.fromkeys(unit for units in self._needs.values() for unit in units))
        self.recorder: Recorder | None = None
        """Of the rank; None: what moves is not recorded."""
        self._is_held = False

    @property
    def device_bytes(self) -> int:
        """That these buffers take up on the device now."""
        return sum(unit.memory.device_bytes for unit in self.units)

    @property
    def host_bytes(self) -> int:
        """That their copies in host memory take up."""
        return sum(unit.memory.host_bytes for unit in self.units)

    def want(self, *needs: Need, filled: Sequence[Unit] = ()) -> None:
        """Make room first, then bring back what calls need. Nothing of it may have been dropped.

        Args:
            filled: get memory, but no values: a move is about to write them.
        """
        wanted = dict.fromkeys(unit for need in needs for unit in self._needs.get(need, ()))
        if not self._is_held:
            for unit in self.units:
                if unit not in wanted and unit not in filled and not unit.memory.is_away:
                    self._leave(unit)
        for unit in filled:
            unit.memory.allocate()
        for unit in wanted:
            if unit.memory.is_away:
                self._record(unit.memory.onloading(), "ONLOAD", unit)

    def now(self, buffer: Tensor) -> Tensor | None:
        """The values of a buffer of this rank, perhaps in host memory; None where they are nowhere."""
        for unit in self.units:
            if (found := unit.memory.now(buffer)) is not buffer:
                return found
        return buffer

    @contextlib.contextmanager
    def holding(self, *needs: Need) -> Iterator[bool]:
        """Within it what these calls need is on the device, and stays. False, and nothing is done: some was dropped."""
        if any(unit.memory.is_dropped for need in needs for unit in self._needs.get(need, ())):
            yield False
            return
        self.want(*needs)
        self._is_held = True
        try:
            yield True
        finally:
            self._is_held = False

    def _leave(self, unit: Unit) -> None:
        if unit.after == "drop":
            unit.memory.drop()
        else:
            self._record(unit.memory.offloading(), "OFFLOAD", unit)

    def _record(self, steps: Iterator[Moved], kind: str, unit: Unit) -> None:
        if self.recorder is None:
            for _ in steps:
                pass
        else:
            to_the_end(recording_moves(steps, self.recorder, unit.role, kind=kind))


def recording_moves(
    steps: Iterator[Moved], recorder: Recorder, role: str = "", lane: str = "link", kind: str | None = None
) -> Generator[None, None, Any]:
    """A move, an action per `next()`, each of them a span; its result is the move's report.

    Args:
        kind: of all of its actions; None: their own.
    """
    while True:
        with recorder.span("", "MOVE", role, lane) as mark:
            try:
                done = next(steps)
            except StopIteration as end:
                mark.keep = False
                return end.value
            mark.action, mark.kind, mark.bytes = done.action, kind or done.kind.name, done.num_bytes
        yield


def to_the_end(actions: Generator[None, None, Any]) -> Any:
    """Do all actions; the result."""
    while True:
        try:
            next(actions)
        except StopIteration as end:
            return end.value
