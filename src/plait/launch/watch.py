"""How the ranks of a group are watched: when one counts as frozen or stalled, and who hears what they tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plait.launch.stall import Stillness

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
