"""What an evaluation on a task's held-out items comes to: accuracy, form, and accuracy given the form."""

from __future__ import annotations

from dataclasses import dataclass

from plait.rewards.answers import Verdict
from plait.rewards.statistics import Estimate, paired_gain, wilson


@dataclass(frozen=True)
class Evaluation:
    """The verdicts that `tasks.TaskReward` logged: one per item (one response each), in the order of the items.

    None stands for an item on which the scorer failed (it hung, or died): such an item counts neither as right nor as
    wrong, and all figures are over the others.
    """

    verdicts: tuple[Verdict | None, ...]

    @property
    def scored(self) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict is not None)

    @property
    def num_items(self) -> int:
        """Items with a verdict."""
        return len(self.scored)

    @property
    def num_dropped(self) -> int:
        return len(self.verdicts) - self.num_items

    @property
    def exact(self) -> Estimate | None:
        """Share of items whose answer got the scorer's full score; None when no item has a verdict."""
        return self._share(sum(verdict is Verdict.EXACT for verdict in self.scored), self.num_items)

    @property
    def well_formed(self) -> Estimate | None:
        return self._share(self._num_formed, self.num_items)

    @property
    def exact_among_well_formed(self) -> Estimate | None:
        """None when no answer was well-formed."""
        return self._share(sum(verdict is Verdict.EXACT for verdict in self.scored), self._num_formed)

    def gain_over(self, before: Evaluation) -> Estimate | None:
        """Gain in exact accuracy over an earlier evaluation on the same items, with its paired 95 % interval.

        Over the items that have a verdict in both; None when there is none.
        """
        pairs = [(old, new) for old, new in zip(before.verdicts, self.verdicts, strict=True) if old and new]
        if not pairs:
            return None
        return paired_gain([old is Verdict.EXACT for old, _ in pairs], [new is Verdict.EXACT for _, new in pairs])

    @property
    def _num_formed(self) -> int:
        return sum(verdict.well_formed for verdict in self.scored)

    def _share(self, count: int, total: int) -> Estimate | None:
        return wilson(count, total) if total else None
