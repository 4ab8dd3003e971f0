"""Which ranks stand still: they live, but do nothing any longer, and wait for nobody who does."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence


class Stillness:
    """How long each rank has been without progress.

    Args:
        num_ranks: of the group.
        progress: a number of each rank that changes with all that it does; 0 or none before it has begun.
        limit_s: of a rank without progress.
        on_devices: ranks compute on devices, on which they wait for each other and do not say for whom.
    """

    def __init__(
        self, num_ranks: int, progress: Callable[[], Sequence[int]], limit_s: float, *, on_devices: bool = False
    ) -> None:
        self.limit_s, self._on_devices = limit_s, on_devices
        self.seconds = [0.0] * num_ranks
        self._progress = progress
        self._seen = [0] * num_ranks

    def look(self, elapsed_s: float) -> None:
        """After so many seconds of watching."""
        now = self._progress()
        for rank, before in enumerate(self._seen):
            count = now[rank] if rank < len(now) else 0
            self.seconds[rank] = self.seconds[rank] + elapsed_s if count and count == before else 0.0
            self._seen[rank] = count

    @property
    def suspects(self) -> list[int]:
        """Ranks without progress for longer than the limit: they may wait for others that have some."""
        return [rank for rank, seconds in enumerate(self.seconds) if seconds > self.limit_s]

    @property
    def excuses_silent(self) -> bool:
        """Whether a rank that says nothing may wait on its device for one that goes on."""
        going = (count and seconds <= self.limit_s for count, seconds in zip(self._seen, self.seconds, strict=True))
        return self._on_devices and any(going)


def stalled_of(suspects: Collection[int], waits_for: Mapping[int, str], *, excuses_silent: bool) -> int | None:
    """The rank to blame: one that waits for nobody, else the first of those that wait for each other.

    None: all of them wait for ranks that go on, as far as is known.

    Args:
        suspects: ranks without progress.
        waits_for: what each of them says to wait for (`WorkerContext.waiting_for`): `ranks 1, 2 (why)`.
        excuses_silent: as of `Stillness`: who waits for nobody is not blamed.
    """
    named = {rank: _ranks_in(waits_for.get(rank, "")) for rank in suspects}
    stuck = {rank for rank in suspects if named[rank] or not excuses_silent}
    while going := {rank for rank in stuck if named[rank] and not named[rank] & stuck}:
        stuck -= going
    waiting_for_nobody = [rank for rank in stuck if not named[rank]]
    return min(waiting_for_nobody or stuck, default=None)


def _ranks_in(text: str) -> set[int]:
    whom = text.partition("(")[0]
    return {int(number) for number in re.findall(r"\d+", whom)} if whom.startswith("rank") else set()
