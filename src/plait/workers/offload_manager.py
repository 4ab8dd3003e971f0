"""What of a rank's buffers is on its device: brought back before the call that needs it, gone before one that does not.

So calls that follow each other on the same part of a model move nothing, and at the end of a step all has left that may
leave.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from plait.reallocation.offload import HostMemory
from plait.schedule.plan import After
from plait.schedule.work import MOVED_ON, Work, to_the_end
from plait.workers.recorder import Recorder

Need = tuple[str, Literal["train", "score", "decode", "home"]]
"""A role and a call of it; `home`: the role's own weights alone, without optimizer state."""


@dataclass(frozen=True, eq=False)
class OffloadUnit:
    """Buffers that come and go together."""

    memory: HostMemory
    after: After
    """Offload or drop."""
    role: str
    """For records; of several that share it the first."""


class OffloadManager:
    """The buffers of one rank that do not stay on its device.

    Args:
        needs: what each call computes with.
    """

    def __init__(self, needs: Mapping[Need, Sequence[OffloadUnit]]) -> None:
        self._needs = dict(needs)
        self.units: tuple[OffloadUnit, ...] = tuple(
            dict.fromkeys(unit for units in self._needs.values() for unit in units)
        )
        self.recorder: Recorder | None = None
        """The rank's recorder; None: what moves is not recorded."""
        self._is_held = False

    def want(self, *needs: Need, filled: Sequence[OffloadUnit] = ()) -> None:
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
                self._record(unit.memory.onloading(), unit)

    def wanting(self, *needs: Need) -> Work[None]:
        """`want` as the first action of a call."""
        self.want(*needs)
        yield MOVED_ON

    def now(self, buffer: Tensor) -> Tensor | None:
        """The values of a buffer of this rank, in its shape and dtype, perhaps in host memory; None where they are
        nowhere."""
        for unit in self.units:
            if (values := unit.memory.now(buffer)) is not buffer:
                return values
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

    def _leave(self, unit: OffloadUnit) -> None:
        if unit.after == "drop":
            unit.memory.drop()
        else:
            self._record(unit.memory.offloading(), unit)

    def _record(self, work: Work[Any], unit: OffloadUnit) -> None:
        if self.recorder is None:
            to_the_end(work)
        else:
            self.recorder.drain(work, unit.role)
