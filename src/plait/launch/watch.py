"""How the ranks of a group are watched: when one counts as frozen or stalled, and who hears what they tell. A rank is
stalled if it lives, but does nothing any longer, and waits for nobody who does."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

_BEATS_PER_FREEZE = 6
_LONGEST_BEAT_S = 1.0


@dataclass(frozen=True)
class Watch:
    """
    freeze_after_s:  silence after which a rank counts as frozen; more than any action holds the interpreter lock
    doing:           says what each rank does within its action, empty where it says nothing; asked when a rank is found
                     dead or frozen, before the others, or a stopped one that is woken for its stack, go on
    progress:        a number of each rank that changes with all that it does
    stalled_after_s: a rank whose number stays as it is for so long, and which waits for no rank whose number changes,
                     counts as stalled; 0: none does
    on_devices:      ranks may wait for each other on devices, which they cannot say: while any rank's number changes,
                     only such as say for whom they wait count as stalled
    heard:           called with (rank, text) of what workers tell (`WorkerContext.tell`); returns at once
    """

    freeze_after_s: float = 30.0
    doing: Callable[[], Sequence[str]] = tuple
    progress: Callable[[], Sequence[int]] = tuple
    stalled_after_s: float = 0.0
    on_devices: bool = False
    heard: Callable[[int, str], None] = lambda rank, text: None

    def __post_init__(self) -> None:
        assert self.freeze_after_s > 0, f"freeze_after_s must be positive, got {self.freeze_after_s}"

    @property
    def beat_s(self) -> float:
        """Between two heartbeats of a rank."""
        return min(_LONGEST_BEAT_S, self.freeze_after_s / _BEATS_PER_FREEZE)

    def stillness(self, num_ranks: int) -> Stillness | None:
        """Finds ranks that live and do nothing; None: they may."""
        if self.stalled_after_s <= 0:
            return None
        return Stillness(num_ranks, self.progress, self.stalled_after_s, on_devices=self.on_devices)


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
        """Ranks without progress for longer than the limit. Some may only wait for ranks that do make progress."""
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
