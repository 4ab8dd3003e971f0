"""How a generation ends where scoring may begin on ranks that have no samples left (stage fusion), as a fluid: what is
idle until its end scores, all but the last parts of each call. Ranks that score parts do not end together: they are
half a small part of the last call apart in the mean, of which each call has its share.

The rules are those of a run's gate (`policy.fusion_gate`), with what is predicted in place of what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from plait.cost.costs import Tail
from plait.policy.early_scores import APART, LAST_SHARE
from plait.policy.fusion_gate import LEAST_SHARE, TIMES_MOVES


@dataclass
class Spare:
    """What the ranks of one generation have to spare until its end.

    end_s:  by which it ends later than without gathering; below 0: sooner
    each_s: of an instance, in the mean
    scores_s: of all scoring on the ranks that generate, one call after the other
    used:   (ranks as a mask, seconds) that scoring has taken of it
    """

    end_s: float
    each_s: float
    scores_s: float
    used: list[tuple[int, float]] = field(default_factory=list)

    def hidden(self, mask: int, seconds: float) -> float:
        """Seconds of a score on these ranks that are behind it when the generation has ended, less those by which its
        ranks end apart; what it takes of the spare is taken."""
        taken = sum(seconds_taken for ranks, seconds_taken in self.used if ranks & mask)
        hidden_s = max(0.0, min(self.each_s - taken, seconds * (1 - LAST_SHARE)))
        self.used.append((mask, hidden_s))
        return hidden_s - APART * seconds * min(1.0, seconds / self.scores_s)


def spare_of(tails: Sequence[Tail], instances: int, scores_s: float) -> Spare:
    """What is to spare where the generation ends as the gate would have it: samples are gathered where that is
    predicted to gain more than a share of what it takes, and than its moves.

    Args:
        tails: as `CallCost.tails`.
        scores_s: of all scoring on the ranks that generate, one after the other.
    """
    first = tails[0]

    def done_s(tail: Tail) -> float:
        """Until all is scored."""
        return tail.end_s + scores_s - min(tail.idle_s / instances, scores_s * (1 - LAST_SHARE))

    best = min(tails, key=done_s)
    needed = max(LEAST_SHARE * done_s(first), TIMES_MOVES * best.move_s)
    tail = best if done_s(first) - done_s(best) >= needed else first
    return Spare(tail.end_s - first.end_s, tail.idle_s / instances, scores_s)
