"""Figures of an evaluation: proportions with their intervals, the gain of a pair of runs, pass@k. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

_Z = NormalDist().inv_cdf(0.975)
"""Two-sided 95 % quantile of the normal: the level of all intervals here."""


@dataclass(frozen=True)
class Estimate:
    """A value with its two-sided 95 % confidence interval. All are fractions, not per cent."""

    value: float
    low: float
    high: float

    def excludes(self, point: float) -> bool:
        """Whether the interval lies wholly to one side of `point`."""
        return not self.low <= point <= self.high

    def __str__(self) -> str:
        return f"{self.value:.1%} [{self.low:.1%}, {self.high:.1%}]"


def wilson(successes: float, total: int) -> Estimate:
    """Proportion with its score interval (Wilson 1927), sound near 0 and 1 and for small counts.

    `successes` may be a sum of shares in [0, 1], one of each of `total` items. Their variance is at most that of as
    many successes, so the interval is then never too narrow.

    Centre (p + z²/2n) / (1 + z²/n), half-width z √(p(1−p)/n + z²/4n²) / (1 + z²/n).
    """
    assert total > 0, "a proportion needs at least one item"
    assert 0 <= successes <= total, f"{successes} successes of {total}"
    z = _Z
    p = successes / total
    shrink = 1 + z * z / total
    centre = (p + z * z / (2 * total)) / shrink
    half = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total)) / shrink
    # At the ends the bound is exact; the formula would miss it by a rounding.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == total else centre + half
    return Estimate(p, low, high)


def paired_gain(before: Sequence[bool], after: Sequence[bool]) -> Estimate:
    """Gain in accuracy on the same items, after − before, with Newcombe's interval for paired proportions.

    Newcombe 1998, Statistics in Medicine 17:2635, method 10: Wilson intervals of both proportions, joined with their
    correlation φ (numerator corrected by n/2 when positive). No resampling, so no seed.

    Args:
        before, after: whether each item was right, the same items in the same order.
    """
    assert len(before) == len(after), f"{len(before)} items before and {len(after)} after are not the same items"
    total = len(before)
    both = sum(1 for x, y in zip(before, after, strict=True) if x and y)
    lost = sum(map(bool, before)) - both
    won = sum(map(bool, after)) - both
    neither = total - both - lost - won
    old = wilson(both + lost, total)
    new = wilson(both + won, total)
    phi = _phi(both, lost, won, neither)

    def joined(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

    gain = (won - lost) / total
    low = gain - joined(new.value - new.low, old.high - old.value)
    high = gain + joined(new.high - new.value, old.value - old.low)
    return Estimate(gain, low, high)


def paired_difference(before: Sequence[float], after: Sequence[float]) -> Estimate | None:
    """Mean difference after − before on the same items, with its interval of Student's t for paired observations.

    Items with NaN on either side are left out; None where fewer than 6 remain.
    """
    differences = [y - x for x, y in zip(before, after, strict=True) if not (math.isnan(x) or math.isnan(y))]
    total = len(differences)
    if total < 6:
        return None
    mean = math.fsum(differences) / total
    variance = math.fsum((d - mean) ** 2 for d in differences) / (total - 1)
    half = _student(total - 1) * math.sqrt(variance / total)
    return Estimate(mean, mean - half, mean + half)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased chance that one of k samples is right: 1 − C(n−c, k) / C(n, k) (Chen et al. 2021, §2.1)."""
    assert 1 <= k <= num_samples, f"pass@{k} needs at least {k} samples, got {num_samples}"
    assert 0 <= num_correct <= num_samples, f"{num_correct} right of {num_samples}"
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def pass_at(right: Sequence[bool | None], per_item: int, k: int) -> Estimate | None:
    """Mean over items of `pass_at_k`, with its 95 % interval (`wilson` over items); None where no item can tell.

    Args:
        right: of each answer, `per_item` of each item in a row; None for an answer without a verdict. An item with
            fewer than k verdicts is left out.
    """
    items = [
        [answer for answer in right[at : at + per_item] if answer is not None] for at in range(0, len(right), per_item)
    ]
    chances = [pass_at_k(len(item), sum(item), k) for item in items if len(item) >= k]
    return wilson(math.fsum(chances), len(chances)) if chances else None


def item_means(values: Sequence[float], per_item: int) -> list[float]:
    """Mean of each item's `per_item` values, NaN left out; NaN for an item of which nothing is left."""
    items = [values[at : at + per_item] for at in range(0, len(values), per_item)]
    left = [[value for value in item if not math.isnan(value)] for item in items]
    return [math.fsum(item) / len(item) if item else math.nan for item in left]


def _phi(both: int, lost: int, won: int, neither: int) -> float:
    margins = (both + lost) * (won + neither) * (both + won) * (lost + neither)
    if margins == 0:
        return 0.0
    cross = both * neither - lost * won
    corrected = max(cross - (both + lost + won + neither) / 2, 0.0) if cross > 0 else cross
    return corrected / math.sqrt(margins)


def _student(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t: the Cornish-Fisher expansion about the normal's z to the third order
    (Abramowitz & Stegun 26.7.5)."""
    z = _Z
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3
