"""When the last samples of a rollout are best gathered, and on how many instances, by the lengths of recent responses
(RLHFuse, paper notes B2 and B4).

Where the optimum lies depends on the lengths, and on how much longer a step takes with each further sample, so it is
computed, not set. The paper bounds the samples of an instance at the knee of its steps (BS_max) and tunes the threshold
alone; here both are tuned, and a knee need not be told.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

from plait.policy.threshold import Course, Gathered, Rollout, kept_counts

FEW = 64
"""Ways of gathering, all of which are tried."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """threshold: the best R_t; kept: the best m with it (the median of what is kept in the draws); total_s: the mean
    over the draws; serial_s: the mean without migration.
    """

    threshold: int
    kept: int
    total_s: float
    serial_s: float


def spread(lengths: Sequence[int], num_instances: int) -> list[list[int]]:
    """Responses to instances in the order of arrival, by turns."""
    return [list(lengths[i::num_instances]) for i in range(num_instances)]


def bootstrap(lengths: Sequence[int], batch: int, *, draws: int, seed: int) -> list[list[int]]:
    """`draws` batches of `batch` response lengths, drawn from recent ones with replacement."""
    rng = random.Random(seed)
    return [rng.choices(lengths, k=batch) for _ in range(draws)]


def tune(
    rollout: Rollout,
    batches: Sequence[Sequence[int]],
    *,
    thresholds: Sequence[int] | None = None,
    kept: Sequence[int] | None = None,
) -> Tuned:
    """The threshold and the number of kept instances with the least mean total over batches of response lengths.

    batches:    lengths in tokens (`bootstrap`), as many in each; the first token of a response comes from its prefill
    thresholds: those to try, from 0 up; all multiples of 1/64 of the batch when None
    kept:       those to try, ascending; `kept_counts` when None
    """
    batch, draws = len(batches[0]), len(batches)
    steps = [[[length - 1 for length in row] for row in spread(lengths, rollout.num_instances)] for lengths in batches]
    courses = [Course(rollout, rows) for rows in steps]
    tried = thresholds if thresholds is not None else range(0, batch + 1, max(1, batch // 64))
    counts = kept if kept is not None else kept_counts(rollout.num_instances)
    mean_s = lambda way: sum(course.gathered(way).total_s for course in courses) / draws
    best = best_way(mean_s, tried, counts)
    outcomes = [course.gathered(best) for course in courses]
    return Tuned(best.threshold, sorted(o.kept for o in outcomes)[draws // 2], mean_s(best), mean_s(Gathered(0)))


def best_way(total_s: Callable[[Gathered], float], thresholds: Sequence[int], kept: Sequence[int]) -> Gathered:
    """The way of gathering that takes the least time: of all where these are few; else of every second of both numbers,
    and from there on a better one beside it, as long as there is one.

    thresholds: those to try, from 0 up
    kept:       those to try, ascending
    """
    total_s = cache(total_s)
    best_of = lambda ways: min([Gathered(0), *(Gathered(*way) for way in ways)], key=lambda way: (total_s(way), way))
    if len(thresholds) * len(kept) <= FEW:
        return best_of(product(thresholds[1:], kept))
    found, best = Gathered(0), best_of(product(thresholds[2::2], kept[::2]))
    while best != found and best.threshold:
        found, best = best, best_of(product(_beside(best.threshold, thresholds), _beside(best.kept, kept)))
    return best


def _beside(value: int, tried: Sequence[int]) -> Sequence[int]:
    """A value of several, and those before and after it."""
    place = tried.index(value)
    return tried[max(0, place - 1) : place + 2]
