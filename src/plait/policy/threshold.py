"""The times of a rollout whose last samples are gathered, by closed forms (RLHFuse, paper notes B4).

A small threshold leaves nothing to overlap, and a large one overloads the instances that are kept; more of these have
shorter steps, and fewer others score. `policy.tuning` finds both numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf
from typing import NamedTuple

from plait.policy.unfinished import Decoding, Left, StepTime, finish_times, merged


@dataclass(frozen=True, slots=True)
class Rollout:
    """What a rollout with migration costs, besides its lengths.

    num_instances: that generate and, once freed, score
    step_s:        seconds of a step with n samples, which brings each a token (`unfinished`)
    score_s:       device seconds that scoring one sample takes, over all scoring models
    max_batch:     samples that a kept instance takes at most, as of `migration.decide`
    migration_s:   seconds during which the samples that move stand still
    frees:         an instance whose samples have all ended scores, whether others move or not; else all score after the
                   last sample, but for instances that a migration frees
    together:      samples of an instance, one behind the other, that can be scored (a prompt's), when the last of them
                   has ended; where `frees`
    load_s:        from when an instance is free until it scores: weights come back
    num_split:     unfinished samples at which groups of `together` are split: what has ended by then is scored without
                   the others, which are scored when the last of them has ended; 0: never
    again_s:       device seconds more that scoring a group takes in two: its prompt is read again
    slots:         samples that an instance runs at once, at most; others wait until one ends
    """

    num_instances: int
    step_s: StepTime
    score_s: float
    max_batch: int
    migration_s: float = 0.0
    frees: bool = False
    together: int = 1
    load_s: float = 0.0
    num_split: int = 0
    again_s: float = 0.0
    slots: float = inf

    def parts(self, ends: Sequence[Sequence[float]]) -> list[list[GroupPart]]:
        """What each sample of each instance is scored with, by when samples end."""
        order, together = sorted(end for row in ends for end in row), self.together
        until = order[-self.num_split - 1] if 0 < self.num_split < len(order) else inf
        return [[GroupPart(i, k // together, end <= until) for k, end in enumerate(row)] for i, row in enumerate(ends)]

    def works(self, parts: Iterable[Sequence[GroupPart]]) -> dict[Hashable, float]:
        """Device seconds of scoring each of these parts."""
        sizes = Counter(part for row in parts for part in row)
        return {
            part: count * self.score_s + (self.again_s if part._replace(is_early=not part.is_early) in sizes else 0) / 2
            for part, count in sizes.items()
        }


class GroupPart(NamedTuple):
    """The samples of a group that are scored together. place: number of the group's instance; group: its number there;
    is_early: whether these are the samples that have ended when the group is split (or the whole group, if it is
    not)"""

    place: int
    group: int
    is_early: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """total_s: until every sample is scored; generation_s: until the last sample ends; kept: instances that finish the
    tail, all of them where nothing migrates; migrated_s: when the migration happens, None where it does not; free_s:
    instance seconds until `generation_s` in which instances have no samples.
    """

    total_s: float
    generation_s: float
    kept: int
    migrated_s: float | None
    free_s: float


class Gathered(NamedTuple):
    """threshold: unfinished samples at most when they are gathered (R_t); 0: they never are, which is serial execution
    kept: instances that go on with them at least (m); more do where these do not take as many"""

    threshold: int
    kept: int = 1


def kept_counts(num_instances: int) -> list[int]:
    """Numbers of instances that may go on with the last samples, about a third apart: 1, 2, 3, 4, 6, 8, 12 …"""
    powers = [1 << bit for bit in range(num_instances.bit_length())]
    return sorted({kept for power in powers for kept in (power, 3 * power // 2) if kept < num_instances})


def outcomes(rollout: Rollout, steps: Sequence[Sequence[int]], gathered: Iterable[Gathered]) -> Iterator[Outcome]:
    """The times of one rollout, for each way in which its last samples are gathered.

    steps: of each sample of each instance
    """
    course = Course(rollout, steps)
    return map(course.gathered, gathered)


def outcome(rollout: Rollout, steps: Sequence[Sequence[int]], threshold: int, kept: int = 1) -> Outcome:
    """`outcomes` for one way."""
    return Course(rollout, steps).gathered(Gathered(threshold, kept))


class Course:
    """A rollout as it goes where no sample migrates, which is the same for all ways of gathering."""

    def __init__(self, rollout: Rollout, steps: Sequence[Sequence[int]]) -> None:
        self._rollout = rollout
        self._instances = [Decoding(row, rollout.step_s, rollout.slots) for row in steps]
        ends = [instance.ends for instance in self._instances]
        self._all_ends = sorted(end for row in ends for end in row)
        self._parts: Sequence[Sequence[Hashable]] = [[None] * len(row) for row in steps]
        self._works: Mapping[Hashable, float] = {}
        self._backlog = Backlog(rollout, (), ())
        count = len(self._all_ends)
        generation_s = self._all_ends[-1] if count else 0.0
        if rollout.frees:  # else nobody asks what is scored together
            parts = rollout.parts(ends)
            self._parts, self._works = parts, rollout.works(parts)
            coming = comings(ends, parts, self._works)
            self._backlog = Backlog(rollout, ends, coming)
            serial_s = drained(rollout, ends, coming, Waiting())
        else:
            serial_s = generation_s + count * rollout.score_s / rollout.num_instances
        as_they_are = sum(generation_s - instance.last_s for instance in self._instances)
        self._serial = Outcome(serial_s, generation_s, rollout.num_instances, None, as_they_are)
        self._known: dict[Gathered, Outcome] = {}
        """By the number that is kept in truth."""
        self._left = lru_cache(maxsize=1)(self._left_at)

    def gathered(self, way: Gathered) -> Outcome:
        """Its times where its last samples are gathered."""
        threshold, least = way
        rollout, count = self._rollout, len(self._all_ends)
        if threshold <= 0 or count == 0:
            return self._serial
        now = 0.0 if threshold >= count else self._all_ends[count - threshold - 1]
        left = self._left(now)
        unfinished = sum(map(len, left))
        kept = max(1, least, ceil(unfinished / rollout.max_batch))
        if unfinished == 0 or kept >= rollout.num_instances or max(map(len, left)) > rollout.slots:
            return self._serial  # samples that wait for a place do not move (`migration.decide`)
        key = Gathered(threshold, kept)
        if key not in self._known:
            self._known[key] = self._migrated(now, left, kept)
        return self._known[key]

    def _left_at(self, now: float) -> list[list[Left]]:
        return [instance.left(now, parts) for instance, parts in zip(self._instances, self._parts, strict=True)]

    def _migrated(self, now: float, left: Sequence[Sequence[Left]], kept: int) -> Outcome:
        """Where samples migrate now, and so many instances are kept.

        Args:
            left: of each instance.
        """
        rollout, unfinished = self._rollout, sum(map(len, left))
        moved_s = now + rollout.migration_s
        loads = merged(left, kept)
        later = [
            finish_times([sample.steps for sample in load], rollout.step_s, moved_s, rollout.slots) for load in loads
        ]
        tail = sorted(end for row in later for end in row)
        freed = sorted(min(now, instance.last_s) for instance in self._instances)[: rollout.num_instances - kept]
        free_s = sum(tail[-1] - time_s for time_s in freed) + sum(tail[-1] - max(row, default=now) for row in later)
        if rollout.frees:
            coming = comings(later, [[sample.part for sample in load] for load in loads], self._works)
            waiting = Waiting(now, self._backlog.at(now), moved_s + rollout.load_s)
            total_s = drained(rollout, later, coming, waiting)
        else:
            ended_s = (len(self._all_ends) - unfinished) * rollout.score_s
            total_s = _drain(rollout, kept, now, ended_s, tail)
        return Outcome(total_s, tail[-1], kept, now, free_s)


Coming = Sequence[tuple[float, float]]
"""When scoring can begin with something more, and the device seconds that it takes."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """now_s, work_s: device seconds of scoring that wait now; free_s: from when on instances without samples score,
    where that is later"""

    now_s: float = 0.0
    work_s: float = 0.0
    free_s: float = 0.0


def comings(
    ends: Iterable[Sequence[float]],
    parts: Iterable[Sequence[Hashable]],
    works: Mapping[Hashable, float],
) -> list[tuple[float, float]]:
    """Parts as they can be scored: each as its last sample ends.

    Args:
        ends, parts: of each sample of each instance.
        works: device seconds of each part, with samples of it that have ended before.
    """
    last: dict[Hashable, float] = {}
    for row, labels in zip(ends, parts, strict=True):
        for end, part in zip(row, labels, strict=True):
            last[part] = max(end, last.get(part, end))
    return [(end, works[part]) for part, end in last.items()]


def drained(rollout: Rollout, ends: Iterable[Sequence[float]], coming: Coming, waiting: Waiting) -> float:
    """When all samples are scored, as a fluid, where instances score as soon as they have none left to generate.

    Args:
        ends: when each sample of each instance that generates ends; instances that are not among them score already.
        coming: what can be scored from when on.
        waiting: what waits before.
    """
    rows = [row for row in ends if row]
    done_s, work_s = waiting.now_s, waiting.work_s
    now, speed = waiting.now_s, 0
    for at, more, freed in _changes(rollout, rows, coming, waiting):
        if work_s > 0 and speed > 0:
            done_s = min(at, now + work_s / speed)
            work_s = max(0.0, work_s - (at - now) * speed)
        now, work_s, speed = at, work_s + more, speed + freed
    if work_s > 0:
        return now + work_s / rollout.num_instances
    return max([done_s, *(max(row) for row in rows)])


class Backlog:
    """Device seconds of scoring that wait at any time of `drained`, from the beginning on; see there."""

    def __init__(self, rollout: Rollout, ends: Iterable[Sequence[float]], coming: Coming) -> None:
        work_s, now, speed = 0.0, 0.0, 0
        self._since = [(now, work_s, speed)]
        """(when, device seconds that wait, instances that score) from each change on."""
        for at, more, freed in _changes(rollout, [row for row in ends if row], coming, Waiting()):
            work_s = max(0.0, work_s - (at - now) * speed) + more
            now, speed = at, speed + freed
            self._since.append((now, work_s, speed))

    def at(self, now_s: float) -> float:
        """Those that wait then."""
        then_s, work_s, speed = self._since[bisect_right(self._since, now_s, key=lambda since: since[0]) - 1]
        return max(0.0, work_s - (now_s - then_s) * speed)


def _changes(
    rollout: Rollout, rows: Sequence[Sequence[float]], coming: Coming, waiting: Waiting
) -> list[tuple[float, float, int]]:
    """(when, device seconds that can be scored from then on, instances that score from then on), in order of time."""
    free = (max(waiting.now_s, waiting.free_s), 0.0, rollout.num_instances - len(rows))
    return sorted(
        [free, *((at, more, 0) for at, more in coming), *((max(row) + rollout.load_s, 0.0, 1) for row in rows)]
    )


def _drain(rollout: Rollout, kept: int, now: float, work_s: float, tail: Sequence[float]) -> float:
    """When all scoring is done, as a fluid: freed instances work from `now`, all of them after the tail's end."""
    speed = rollout.num_instances - kept
    for end in tail:
        work_s = max(0.0, work_s - (end - now) * speed) + rollout.score_s
        now = end
    return now + work_s / rollout.num_instances
