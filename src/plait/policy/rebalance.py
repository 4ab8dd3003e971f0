"""Rebalancing: which samples instances give to others, so that a rollout ends sooner.

An instance with many samples decodes slower than one with few, and a rollout ends with its last sample. Nobody knows
which that is: so what counts is when the last of all is expected to end, if each sample is as likely as any other to
need any of the steps that earlier ones needed. `rebalance` predicts that by a curve of seconds per step, and moves
samples from the instances that have most to those that have fewest. Numbers in, decision out.

A step is here what brings each running sample a token. Where draft tokens are accepted, a step of the engine is
several.

Shapes: lists of an instance's *chances*, steps of which each is as likely as any other, rising.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, inf, log

from plait.policy.step import Key

StepSeconds = Callable[[float, float], float]
"""Seconds until each of so many samples, whose contexts have so many tokens in all, has a token more: of a decode step,
or of its share where draft tokens are accepted. Expected samples are no whole numbers."""

LEAST_SHARE = 0.003
"""What all moves of a decision must gain, of the time that is left."""
TIMES_MOVES = 3.0
"""Every instance that gives or takes counts as held up so many times as long as it is: who waits knows more, and may
move fewer."""
MOST_CHANCES = 64
"""Steps that a sample of an instance may still need: so many are told apart."""
LEAST_LEFT = 32
"""Steps, or all that the limit allows if that is less, of a sample that is longer than any before."""
GOLDEN = (5**0.5 - 1) / 2
LEVELS = 8
"""Numbers of samples that no instance is to exceed which are tried, from the mean to the most of an instance."""


@dataclass(frozen=True, slots=True)
class UnfinishedSample:
    """An unfinished sample.

    context: tokens of prompt and response so far
    moves:   whether it may move: it has begun, and has not moved before
    """

    key: Key
    context: int
    moves: bool = True


@dataclass(frozen=True, slots=True)
class InstanceWork:
    """An instance and its unfinished samples, in the order in which it begins with them.

    chances:   steps that a sample of it may still need, each as likely as any other, rising
    kv_tokens: that its pool of keys and values takes
    takes:     whether samples of others may go on here
    """

    place: int
    growing: tuple[UnfinishedSample, ...]
    chances: tuple[int, ...]
    kv_tokens: float = inf
    takes: bool = True


@dataclass(frozen=True, slots=True)
class MoveCost:
    """pause_s: an instance that gives or takes stands still; token_s: more for each token of context that moves"""

    pause_s: float = 0.0
    token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Shift:
    """A sample that goes on in another instance."""

    sample: UnfinishedSample
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Rebalancing:
    """shifts: what moves; before_s, after_s: expected seconds until the last sample ends, without and with that."""

    shifts: tuple[Shift, ...]
    before_s: float
    after_s: float


def chances_of(said: Sequence[int], lengths: Sequence[int], limit: int) -> tuple[int, ...]:
    """Steps that a sample of an instance may still need, each as likely as any other, rising: what is left of an
    earlier length that is longer than what one of its samples has said.

    Args:
        said: tokens of each sample so far; if empty, as for one sample without any.
        lengths: of earlier samples, rising.
        limit: tokens of a response at most.
    """
    said, steps = said or (0,), []
    for number in range(max(len(said), MOST_CHANCES)):
        tokens, left = said[number % len(said)], LEAST_LEFT
        first = bisect_right(lengths, tokens)
        if first < len(lengths):
            share = (number + 0.5) * GOLDEN % 1  # neighbours far apart, and all of them evenly spread
            left = lengths[first + int(share * (len(lengths) - first))] - tokens
        steps.append(min(max(1, limit - tokens), left))
    steps.sort()
    return tuple(steps[(2 * number + 1) * len(steps) // (2 * MOST_CHANCES)] for number in range(MOST_CHANCES))


def ends_s(work: InstanceWork, step_s: StepSeconds, slots: int) -> list[float]:
    """Seconds until a sample of an instance has ended, for each of its chances.

    Args:
        slots: samples that it runs at once.

    While the sample goes on, each of the others does with the share of the chances that are as long. Samples beyond
    the slots wait until as many have ended; the one that is asked for is the last to begin.
    """
    num = len(work.growing)
    running, chances = min(num, slots), work.chances
    context = sum(sample.context for sample in work.growing) / max(num, 1)
    seconds, done, ends = 0.0, 0, []
    if num > slots:
        steps = (num - slots) / slots * sum(chances) / len(chances)
        seconds = steps * step_s(slots, slots * (context + sum(chances) / len(chances) / 2))
    for number, steps in enumerate(chances):
        if steps > done:
            alive = 1 + (running - 1) * (len(chances) - number) / len(chances)
            seconds += (steps - done) * step_s(alive, alive * (context + (done + steps) / 2))
            done = steps
        ends.append(seconds)
    return ends


def last_end_s(ends: Sequence[tuple[int, Sequence[float]]]) -> float:
    """When the last of all samples is expected to end.

    Args:
        ends: of each instance, how many samples it has, and when one of them may end (`ends_s`).

    All have ended by t with the product of the chances of each: of an instance of n samples, of whose L ends k are not
    behind t, (k / L)^n.
    """
    of_which = [(num, len(seconds)) for num, seconds in ends if num]
    events = heapq.merge(
        *(
            [(second, place) for second in seconds]
            for place, seconds in enumerate(seconds for num, seconds in ends if num)
        )
    )
    passed, started, log_chance, last, expected = [0] * len(of_which), 0, 0.0, 0.0, 0.0
    for second, place in events:
        ended = exp(log_chance) if started == len(of_which) else 0.0
        expected += (1.0 - ended) * (second - last)
        last = second
        num, length = of_which[place]
        started += passed[place] == 0
        before = log(passed[place] / length) if passed[place] else 0.0
        passed[place] += 1
        log_chance += num * (log(passed[place] / length) - before)
    return expected


def rebalance(instances: Sequence[InstanceWork], step_s: StepSeconds, slots: int, cost: MoveCost) -> Rebalancing:
    """The moves after which the last sample is expected to end soonest.

    Args:
        instances: all of the model, one at least.
        slots: samples that an instance runs at once.

    For some numbers of samples, from the mean to what the fullest has, all that is more goes to the instances that have
    fewest and room; of those with the shortest contexts first. No instance both gives and takes. Nothing moves where
    that gains too little.
    """
    works = {instance.place: instance for instance in instances}
    before = _expected_s(works.values(), {}, step_s, slots)
    best: tuple[float, list[Shift]] | None = None
    for most in _levels([len(work.growing) for work in instances]):
        shifts = _levelled(works, most, slots)
        if not shifts:
            continue
        pauses = {place: TIMES_MOVES * pause for place, pause in _held_up_s(shifts, cost).items()}
        end = _expected_s(_moved(works, shifts), pauses, step_s, slots)
        if best is None or (end, len(shifts)) < (best[0], len(best[1])):
            best = end, shifts
    if best is None or before - best[0] < max(LEAST_SHARE * before, 1e-12):
        return Rebalancing((), before, before)
    shifts = best[1]
    after = _expected_s(_moved(works, shifts), _held_up_s(shifts, cost), step_s, slots)
    return Rebalancing(tuple(shifts), before, after)


def _levels(counts: Sequence[int]) -> list[int]:
    """Samples that no instance is to exceed, the fullest first."""
    least, most = max(1, ceil(sum(counts) / len(counts))), max(counts)
    return sorted({least + (most - least) * number // LEVELS for number in range(LEVELS)} - {most}, reverse=True)


def _levelled(works: Mapping[int, InstanceWork], most: int, slots: int) -> list[Shift]:
    """What moves so that no instance has more than so many samples, as far as others have room."""
    growing_by_giver = {
        place: sorted(
            (sample for sample in work.growing if sample.moves), key=lambda sample: (sample.context, sample.key)
        )[: len(work.growing) - most]
        for place, work in works.items()
        if len(work.growing) > most
    }
    takers = [
        (len(work.growing), place) for place, work in works.items() if work.takes and place not in growing_by_giver
    ]
    heapq.heapify(takers)
    expected_tokens = {place: _expected_tokens(works[place], works[place].growing) for _, place in takers}
    shifts: list[Shift] = []
    givers = [(-len(works[place].growing), place) for place, samples in growing_by_giver.items() if samples]
    heapq.heapify(givers)
    while givers and takers and takers[0][0] < min(most, slots):
        count, source = heapq.heappop(givers)
        num, target = heapq.heappop(takers)
        sample = growing_by_giver[source][0]
        tokens = _expected_tokens(works[source], [sample])
        if expected_tokens[target] + tokens > works[target].kv_tokens:  # it takes no more
            heapq.heappush(givers, (count, source))
            continue
        expected_tokens[target] += tokens
        shifts.append(Shift(growing_by_giver[source].pop(0), source, target))
        heapq.heappush(takers, (num + 1, target))
        if growing_by_giver[source]:
            heapq.heappush(givers, (count + 1, source))
    return shifts


def _expected_tokens(work: InstanceWork, samples: Sequence[UnfinishedSample]) -> float:
    """Keys and values of samples of an instance, at the lengths that are expected of them."""
    return sum(sample.context for sample in samples) + len(samples) * sum(work.chances) / len(work.chances)


def _moved(works: Mapping[int, InstanceWork], shifts: Sequence[Shift]) -> list[InstanceWork]:
    """The instances afterwards. One that had nothing expects of its samples what their first instance did."""
    gone = {shift.sample.key for shift in shifts}
    came: dict[int, list[Shift]] = {}
    for shift in shifts:
        came.setdefault(shift.target, []).append(shift)
    moved = []
    for work in works.values():
        new = came.get(work.place, [])
        growing = (*(sample for sample in work.growing if sample.key not in gone), *(shift.sample for shift in new))
        chances = works[new[0].source].chances if new and not work.growing else work.chances
        moved.append(replace(work, growing=growing, chances=chances))
    return moved


def _held_up_s(shifts: Sequence[Shift], cost: MoveCost) -> dict[int, float]:
    """Seconds that instances stand still for what moves."""
    held_up: dict[int, float] = {}
    for shift in shifts:
        for place in (shift.source, shift.target):
            held_up[place] = held_up.get(place, cost.pause_s) + cost.token_s * shift.sample.context
    return held_up


def _expected_s(works: Iterable[InstanceWork], pauses: Mapping[int, float], step_s: StepSeconds, slots: int) -> float:
    """When the last sample of all is expected to end, if instances stand still for so long."""
    ends = []
    for work in works:
        pause = pauses.get(work.place, 0.0)
        ends.append((len(work.growing), [pause + end for end in ends_s(work, step_s, slots)]))
    return last_end_s(ends)
