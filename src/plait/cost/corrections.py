"""Corrects what a profile predicts by earlier runs: measured over predicted seconds, for each kind of call; a kind
that no run had on this number of ranks takes its ratio from other numbers of ranks. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from plait.cost.costs import CallCost
from plait.cost.profile import MOVE, Ratio, kind_on
from plait.schedule.plan import Placement

PRIOR_STEPS = 1
"""Measured steps that say as much as the assumption that a profile is right on another number of ranks. Steps of a run
differ by a tenth, runs from profiles by a fifth to a third, by which a tenth of a step would do: one leaves room for
what differs between numbers of ranks."""
BETWEEN = frozenset({"gathered weights", "gradients", "hops", "new weights", "rows", "tensor parallel"})
"""Terms of what ranks do with each other, which a carried correction leaves alone: more ranks have other ones."""


@dataclass(frozen=True)
class Correction:
    """
    factor:  times as long as the profile says that a call of some kind takes
    kind:    whose calls were measured; steps: in so many steps
    carried: these calls were on another number of ranks: `factor` is nearer to 1 than what was measured, the fewer
             steps there were, and counts for what each rank computes by itself
    """

    factor: float
    kind: str
    steps: int
    carried: bool = False

    def of(self, cost: CallCost) -> CallCost:
        """A call's cost as the profile says it, corrected."""
        return cost.times(self.factor, but=BETWEEN if self.carried else frozenset())


class Corrections:
    """
    Args:
        ratios: of kinds (`Profile.ratios`).
    """

    def __init__(self, ratios: Mapping[str, Ratio]) -> None:
        self._ratios = dict(ratios)

    @property
    def move(self) -> float:
        """Times as long as the profile says that moves of weights take."""
        return self._ratios[MOVE].value if MOVE in self._ratios else 1.0

    def of(self, mode: str, ranks: int) -> Correction | None:
        """The correction of calls in a mode on so many ranks; None: no run had calls in this mode.

        Of several numbers of ranks the nearest one is carried, by how many times as many they are, of two that are as
        near the less.
        """
        kind = kind_on(mode, ranks)
        if kind in self._ratios:
            return Correction(self._ratios[kind].value, kind, self._ratios[kind].steps)
        numbers = [int(other.rpartition(" ")[2]) for other in self._ratios if other.startswith(f"{mode} on ")]
        if not numbers:
            return None
        kind = kind_on(mode, min(numbers, key=lambda number: (abs(math.log2(number / ranks)), number)))
        ratio = self._ratios[kind]
        factor = ratio.value ** (ratio.steps / (ratio.steps + PRIOR_STEPS))
        return Correction(factor, kind, ratio.steps, carried=True)

    def carried(self, placements: Iterable[Placement], roles: Collection[str]) -> dict[str, Correction]:
        """Kind → its correction, of the kinds of a plan's calls whose correction is carried. Where prompts are computed
        apart, that is a part of the generation.

        Args:
            roles: that models answer for.
        """
        asked = {
            ("decode" if place.mode == "prefill" else place.mode, len(place.ranks))
            for place in placements
            if place.role in roles
        }
        by_kind = {kind_on(mode, ranks): self.of(mode, ranks) for mode, ranks in asked}
        return {kind: own for kind, own in sorted(by_kind.items()) if own is not None and own.carried}


def carried_record(carried: Mapping[str, Correction]) -> dict[str, dict[str, str | int | float]]:
    """For JSON: kind → `of` which it was measured, in how many `steps`, and the `factor`."""
    return {
        kind: {"of": correction.kind, "steps": correction.steps, "factor": correction.factor}
        for kind, correction in carried.items()
    }


def with_carried(source: str, carried: Mapping[str, Correction]) -> str:
    """Where seconds come from, in words, with what of them is carried."""
    texts = (
        f"{kind} {own.factor:.2f} times as long, carried from {own.kind} ({own.steps} step{'s' * (own.steps > 1)})"
        for kind, own in carried.items()
    )
    return f"{source}; {', '.join(texts)}" if carried else source
