"""What an evaluation on a task's held-out items comes to: accuracy, form, and accuracy given the form."""

from __future__ import annotations

import math
from dataclasses import dataclass

from plait.rewards.answers import Verdict
from plait.rewards.statistics import Estimate, item_means, paired_difference, paired_gain, wilson


@dataclass(frozen=True)
class Evaluation:
    """The verdicts that `tasks.TaskReward` logged: one per answer, in the order of the items.

    None stands for an item on which the scorer failed (it hung, or died): such an item counts neither as right nor as
    wrong, and all figures are over the others.
    """

    verdicts: tuple[Verdict | None, ...]
    per_item: int = 1
    """Answers to each item, in a row. Intervals are those of as many items, each counted once: answers to one item are
    not independent of each other."""

    @property
    def scored(self) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict is not None)

    @property
    def num_items(self) -> int:
        """Answers with a verdict."""
        return len(self.scored)

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

        Over the items that have a verdict in both; None when there is none (with several answers to each item: when
        there are fewer than six).
        """
        if self.per_item > 1 or before.per_item > 1:
            return paired_difference(before._exact_by_item(), self._exact_by_item())
        pairs = [(old, new) for old, new in zip(before.verdicts, self.verdicts, strict=True) if old and new]
        if not pairs:
            return None
        return paired_gain([old is Verdict.EXACT for old, _ in pairs], [new is Verdict.EXACT for _, new in pairs])

    @property
    def _num_formed(self) -> int:
        return sum(verdict.well_formed for verdict in self.scored)

    def _exact_by_item(self) -> list[float]:
        shares = [math.nan if verdict is None else float(verdict is Verdict.EXACT) for verdict in self.verdicts]
        return item_means(shares, self.per_item)

    def _share(self, count: int, total: int) -> Estimate | None:
        if not total or self.per_item == 1:
            return wilson(count, total) if total else None
        items = math.ceil(total / self.per_item)
        return wilson(count / total * items, items)
