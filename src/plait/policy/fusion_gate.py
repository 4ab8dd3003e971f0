"""When the last samples of a rollout are gathered (`fusion: auto`): where that is predicted to gain more than it costs.

At the beginning of a rollout a threshold is tuned on the lengths of the last steps (`tuning.tune`); when so few
samples are unfinished, and as each of them ends, what is left is weighed again, for several numbers of instances that
are kept: with more of them steps are shorter, and fewer instances score meanwhile. What steps took is measured, and so
never exact: gathering must gain as much as it needs to by what was measured, and lose nothing where that is wrong.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from operator import itemgetter

from plait.policy.threshold import Rollout, Waiting, comings, drained, kept_counts
from plait.policy.tuning import bootstrap, tune
from plait.policy.unfinished import Left, finish_times, merged

LEAST_SHARE = 0.02
"""What gathering must gain, of a step."""
TIMES_MOVES = 3.0
"""As much as the moves take, that gathering must gain."""
WRONG = 0.2
"""Each of the terms may be wrong by so large a share, and gathering must not lose."""
DRAWS = 4
"""Rollouts that are drawn from earlier lengths at most."""
DRAWN = 4096
"""Samples of all of them: of larger rollouts fewer are drawn, and of such as have more one, which tells as much."""
THRESHOLDS = 16
"""That are tried, up to half of the samples."""


@dataclass(frozen=True)
class RolloutSize:
    """What a rollout is: samples in all, instances that generate them, how many an instance takes at once, and how many
    can be scored together (those of a prompt), when the last of them has ended; num_split: unfinished samples at which
    those that have ended are scored without the others of their prompts."""

    samples: int
    instances: int
    max_batch: int
    together: int = 1
    num_split: int = 0


@dataclass(frozen=True)
class Seen:
    """What the last steps took.

    fixed_s, each_s: seconds until each sample of an instance has a token more, and more for each sample that runs
    score_s:         of one instance to score a sample, by all models that score where samples are generated
    move_s:          in which samples that move stand still
    step_s:          of a training step
    load_s:          of an instance until weights of models that score are back from host memory
    tokens:          that a sample gets in a decode step, in the mean
    """

    fixed_s: float
    each_s: float
    score_s: float
    move_s: float
    step_s: float
    load_s: float = 0.0
    tokens: float = 1.0

    @property
    def needed_s(self) -> float:
        """That gathering must gain."""
        return max(LEAST_SHARE * self.step_s, TIMES_MOVES * self.move_s)

    def token_s(self, running: int) -> float:
        """Until each of so many samples has a token more."""
        return self.fixed_s + self.each_s * running

    def decode_s(self, running: int) -> float:
        """Seconds of a decode step of so many samples."""
        return self.tokens * self.token_s(running)

    def rollout(self, size: RolloutSize) -> Rollout:
        """Prompts of split groups are read again whether samples move or not: that counts nowhere."""
        return Rollout(
            size.instances,
            self.token_s,
            self.score_s,
            size.max_batch,
            self.move_s,
            frees=True,
            together=size.together,
            load_s=self.load_s,
            num_split=size.num_split,
            slots=size.max_batch,
        )

    def doubted(self) -> list[Seen]:
        """What steps may take in truth, where a gain is least: a further sample that runs, moves and loads take longer,
        and the others longer or less long."""
        more, less = 1 + WRONG, 1 - WRONG
        return [
            replace(
                self,
                fixed_s=fixed * self.fixed_s,
                each_s=more * self.each_s,
                score_s=score * self.score_s,
                move_s=more * self.move_s,
                load_s=more * self.load_s,
            )
            for fixed, score in product((less, more), repeat=2)
        ]


@dataclass(frozen=True)
class Choice:
    """threshold: unfinished samples from which on gathering is weighed; 0: it is not in this rollout"""

    threshold: int
    gain_s: float = 0.0
    needed_s: float = 0.0
    why: str = ""


def num_draws(samples: int) -> int:
    """Rollouts of so many samples that are drawn from earlier lengths."""
    return max(1, min(DRAWS, DRAWN // max(1, samples)))


def thresholds_of(samples: int) -> range:
    """Unfinished samples of a rollout of so many at which gathering is tried, from 0 up."""
    return range(0, samples // 2 + 1, max(1, samples // 2 // THRESHOLDS))


def choose(seen: Seen | None, lengths: Sequence[int], size: RolloutSize, seed: int) -> Choice:
    """What to do in a rollout.

    Args:
        lengths: of responses of the last steps.
        seed: of the draws from them.
    """
    if seen is None or not lengths:
        return Choice(0, why="no step was measured yet")
    if size.instances < 2 or seen.score_s <= 0:
        return Choice(0, why="nothing could be scored meanwhile")
    most, tried = size.samples, thresholds_of(size.samples)
    tuned = tune(seen.rollout(size), bootstrap(lengths, most, draws=num_draws(most), seed=seed), thresholds=tried)
    gain = tuned.serial_s - tuned.total_s
    if gain < seen.needed_s:
        return Choice(0, gain, seen.needed_s, "it would gain too little")
    return Choice(tuned.threshold, gain, seen.needed_s)


@dataclass(frozen=True)
class Remaining:
    """What of a rollout is left.

    unfinished: of each instance: the prompt of each unfinished sample; samples of a prompt are scored when all of them
                have ended, but for those that are scored before where groups are split
    said:       tokens that each of them has, as far as is known
    waiting_s:  instance seconds of scoring that wait
    kept:       instances in which all that is unfinished would go on at least
    """

    unfinished: Sequence[Sequence[int]]
    said: Sequence[Sequence[int]]
    waiting_s: float
    kept: int = 1


def best_kept(seen: Seen, lengths: Sequence[int], left: Remaining, size: RolloutSize) -> int:
    """The number of instances in which gathering now gains most, of those with which it gains what it must, and loses
    nothing where what was measured is wrong by a fifth; 0: there is none, and nothing is gathered now."""
    gains = gains_s(seen, lengths, left, size)
    counts = [kept for kept, gain in gains.items() if gain >= seen.needed_s]
    for doubted in seen.doubted():
        if not counts:
            return 0
        waiting_s = left.waiting_s * doubted.score_s / seen.score_s
        least = gains_s(doubted, lengths, replace(left, waiting_s=waiting_s), size, counts)
        counts = [kept for kept in counts if least[kept] >= 0]
    return max(counts, key=lambda kept: (gains[kept], -kept), default=0)


def gains_s(
    seen: Seen, lengths: Sequence[int], left: Remaining, size: RolloutSize, counts: Sequence[int] | None = None
) -> dict[int, float]:
    """Number of instances that are kept → seconds that gathering now would gain; none that would not free one.

    Args:
        lengths: of responses of the last steps: those that are longer than what is done say what is left.
        counts: numbers that are asked for; None: the least that may be, and `kept_counts`.
    """
    rows = _expected(lengths, left)
    count, at_work = sum(map(len, rows)), sum(1 for row in rows if row)
    least = max(left.kept, ceil(count / size.max_batch))
    asked = counts if counts is not None else sorted({least, *kept_counts(at_work)})
    tried = [kept for kept in asked if least <= kept < at_work]
    if not tried:
        return {}
    rollout = seen.rollout(size)
    sizes = Counter(sample.part for row in rows for sample in row)
    works = {
        part: (size_of_part if count <= size.num_split else size.together) * seen.score_s
        for part, size_of_part in sizes.items()
    }

    def end_s(loads: Sequence[Sequence[Left]], stand_still_s: float, free_s: float) -> float:
        ends = [
            finish_times([sample.steps for sample in load], seen.token_s, stand_still_s, size.max_batch)
            for load in loads
        ]
        coming = comings(ends, [[sample.part for sample in load] for load in loads], works)
        return drained(rollout, ends, coming, Waiting(0.0, left.waiting_s, free_s))

    as_they_are_s, moved_s = end_s(rows, 0.0, 0.0), seen.move_s + seen.load_s
    return {kept: as_they_are_s - end_s(merged(rows, kept), seen.move_s, moved_s) for kept in tried}


def _expected(lengths: Sequence[int], left: Remaining) -> list[list[Left]]:
    """What is left of each unfinished sample: quantiles of what is left of those that were longer than it is, dealt by
    turns to instances, and in each to its parts, so that none has all of the long ones. Nothing of those that are
    longer than any was. Those that wait for a place, which have said nothing, come behind the others."""
    ordered, count = sorted(lengths), sum(map(len, left.unfinished))
    rows: list[list[tuple[bool, Left]]] = [[] for _ in left.unfinished]
    turns = [_by_turns(list(zip(*row, strict=True))) for row in zip(left.unfinished, left.said, strict=True)]
    order = [(k, place) for place, row in enumerate(turns) for k in range(len(row))]
    for i, (k, place) in enumerate(sorted(order)):
        part, said = turns[place][k]
        first = bisect_right(ordered, said)
        if first < len(ordered):
            longer = ordered[first + (2 * i + 1) * (len(ordered) - first) // (2 * count)]
            rows[place].append((said == 0, Left(longer - said, part)))
    return [[sample for _, sample in sorted(row, key=itemgetter(0))] for row in rows]


def _by_turns(samples: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same (part, tokens), the first of each part before the second of any."""
    met: Counter[int] = Counter()
    order: list[tuple[int, tuple[int, int]]] = []
    for sample in samples:
        order.append((met[sample[0]], sample))
        met[sample[0]] += 1
    return [sample for _, sample in sorted(order, key=lambda turn: turn[0])]
