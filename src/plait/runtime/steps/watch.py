"""What looks at a rollout while it runs, and has its samples go on in other instances."""

from __future__ import annotations

from dataclasses import dataclass

from plait.runtime.steps.rebalancing import Balance
from plait.runtime.steps.tail import Tail


@dataclass(frozen=True)
class Watch:
    """What may move the samples of one rollout between instances."""

    tail: Tail | None = None
    """Gathers the last samples in few instances; None: they end where they are."""
    balance: Balance | None = None
    """Moves samples to instances that would end sooner; None: they stay where they are."""

    def look(self, finished: int) -> None:
        """After a step of the engine that has finished so many samples."""
        if self.tail is not None:
            self.tail.look(finished)
        if self.balance is not None:
            self.balance.look(frees=self.tail is not None)

    def end(self) -> int:
        """All samples have ended. How many have moved."""
        for moves in (self.tail, self.balance):
            if moves is not None:
                moves.end()
        return sum(moves.num_moved for moves in (self.tail, self.balance) if moves is not None)
