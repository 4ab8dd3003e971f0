"""Rebalancing: which samples instances give to others, so that all end their samples at about the same time.

An instance with many samples decodes slower than one with few, and a rollout ends with its last instance. `rebalance`
foretells when each ends, by a curve of seconds per step, and moves the fewest samples that bring the last end down:
from an instance that is above the knee of that curve to the one that ends first. Numbers in, decision out.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from plait.policy.step import Key

StepSeconds = Callable[[int, float], float]
"""Seconds of a decode step of so many samples, whose contexts have so many tokens in all."""

KNEE = 0.8
"""Share of one sample's tokens per second that a further sample must bring, or the instance is above its knee. At 0.2,
as for serving, an instance with nine samples would keep them beside one with a single sample, where moving four ends
them a quarter sooner."""
EQUAL = 0.002
"""Ends that differ by this share count as equal: no sample moves for less."""
LEAST_SHARE = 0.005
"""What all moves of a decision must gain, of the time that is left."""
TIMES_MOVES = 3.0
"""As much as a move holds up an instance, that they must gain; and as long a sample must have left."""


@dataclass(frozen=True, slots=True)
class UnfinishedSample:
    """An unfinished sample.

    context: tokens of prompt and response so far
    left:    decode steps that it is expected to need
    moves:   whether it may move: it has begun, and has not moved before
    """

    key: Key
    context: int
    left: int
    moves: bool = True


@dataclass(frozen=True, slots=True)
class InstanceWork:
    """An instance and its unfinished samples, in the order in which it begins with them.

    kv_tokens: that its pool of keys and values takes
    takes:     whether samples of others may go on here
    """

    place: int
    growing: tuple[UnfinishedSample, ...]
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
    """shifts: what moves; before_s, after_s: predicted seconds until the last sample ends, without and with that;
    why: it is empty, where it is
    """

    shifts: tuple[Shift, ...]
    before_s: float
    after_s: float
    why: str = ""


def knee(step_s: StepSeconds, most: int, context: float = 0.0, share: float = KNEE) -> int:
    """Samples from which on a further one brings less than `share` of the tokens per second of a single one.

    Args:
        most: samples of an instance; that is the knee of a curve that has none below.
        context: tokens of a sample.
    """
    alone = 1 / step_s(1, context)
    for count in range(1, most):
        now, more = count / step_s(count, count * context), (count + 1) / step_s(count + 1, (count + 1) * context)
        if more - now < share * alone:
            return count
    return most


def end_s(growing: Sequence[UnfinishedSample], step_s: StepSeconds, slots: int) -> float:
    """Seconds until an instance has ended all its samples, at most `slots` of them at once, in their order.

    Between two ends the number of samples is constant, and the context of each grows by a token a step.
    """
    ends: list[tuple[int, int]] = []
    done, seconds, context, begun = 0, 0.0, 0, 0
    while ends or begun < len(growing):
        while len(ends) < slots and begun < len(growing):
            heapq.heappush(ends, (done + growing[begun].left, growing[begun].context - done))
            context += growing[begun].context
            begun += 1
        count, end = len(ends), ends[0][0]
        steps = end - done
        if steps:
            seconds += steps * step_s(count, context + count * steps / 2)
            context += count * steps
            done = end
        context -= heapq.heappop(ends)[1] + done
    return seconds


def rebalance(instances: Sequence[InstanceWork], step_s: StepSeconds, slots: int, cost: MoveCost) -> Rebalancing:
    """The fewest moves that bring the predicted end of the last instance down.

    Args:
        instances: all of the model, one at least.
        slots: samples that an instance runs at once.

    The instance that ends last gives to the one that ends first of those that have room, in counts of 1, 2, 4, …, as
    often as that brings its end down; one that has given takes nothing. Moves that turn out to be unneeded are undone.
    No sample moves twice, so it ends. Nothing moves where all of it would gain too little.
    """
    ledger = _Ledger(instances, step_s, slots, cost)
    before = ledger.last_s
    while (shifts := _next(ledger)) is not None:
        for shift in shifts:
            ledger.shift(shift)
    ledger.drop_unneeded()
    after = ledger.last_s
    if not ledger.shifts:
        return Rebalancing((), before, before, "no move ends the last instance sooner")
    needed = max(LEAST_SHARE * before, TIMES_MOVES * max(map(ledger.held_up_s, ledger.works)))
    if before - after < needed:
        return Rebalancing((), before, before, "it would gain too little")
    return Rebalancing(tuple(ledger.shifts), before, after)


class _Ledger:
    """Who has which samples while a decision is made, and when each instance ends then."""

    def __init__(self, instances: Sequence[InstanceWork], step_s: StepSeconds, slots: int, cost: MoveCost) -> None:
        self.works = {instance.place: instance for instance in instances}
        self.growing = {instance.place: instance.growing for instance in instances}
        self.step_s, self.slots, self.cost = step_s, slots, cost
        self.shifts: list[Shift] = []
        self.ends = {place: self.end(place, ()) for place in self.works}

    @property
    def last_s(self) -> float:
        return max(self.ends.values(), default=0.0)

    def held_up_s(self, place: int, more: Sequence[Shift] = ()) -> float:
        """Seconds that an instance stands still for what moves."""
        mine = [shift for shift in (*self.shifts, *more) if place in (shift.source, shift.target)]
        return self.cost.pause_s + self.cost.token_s * sum(shift.sample.context for shift in mine) if mine else 0.0

    def end(self, place: int, more: Sequence[Shift]) -> float:
        """When an instance ends, if these samples moved as well."""
        left = {shift.sample.key for shift in more if shift.source == place}
        here = [sample for sample in self.growing[place] if sample.key not in left]
        here += [shift.sample for shift in more if shift.target == place]
        return end_s(here, self.step_s, self.slots) + self.held_up_s(place, more)

    def has_room(self, place: int, coming: Sequence[UnfinishedSample]) -> bool:
        """Whether samples fit into an instance, at the lengths that are expected of all of them."""
        here = [*self.growing[place], *coming]
        return (
            len(here) <= self.slots
            and sum(sample.context + sample.left for sample in here) <= self.works[place].kv_tokens
        )

    def shift(self, shift: Shift) -> None:
        source, target = shift.source, shift.target
        self.growing[source] = tuple(sample for sample in self.growing[source] if sample.key != shift.sample.key)
        self.growing[target] = (*self.growing[target], shift.sample)
        self.shifts.append(shift)
        self._count(shift)

    def _count(self, shift: Shift) -> None:
        for place in (shift.source, shift.target):
            self.ends[place] = self.end(place, ())

    def drop_unneeded(self) -> None:
        """Undo moves without which the last instance ends no later."""
        last, again = self.last_s, True
        while again:
            again = False
            for shift in reversed(tuple(self.shifts)):
                growing, ends = dict(self.growing), dict(self.ends)
                self._undo(shift)
                if self.last_s <= last:
                    again = True
                else:
                    self.growing, self.ends = growing, ends
                    self.shifts.append(shift)

    def _undo(self, shift: Shift) -> None:
        self.shifts.remove(shift)
        places = {sample.key: number for number, sample in enumerate(self.works[shift.source].growing)}
        self.growing[shift.target] = tuple(
            sample for sample in self.growing[shift.target] if sample.key != shift.sample.key
        )
        back = (*self.growing[shift.source], shift.sample)
        self.growing[shift.source] = tuple(sorted(back, key=lambda sample: places[sample.key]))
        self._count(shift)


def _next(ledger: _Ledger) -> list[Shift] | None:
    """Moves from the instance that ends last, after which it and the one that takes them end soonest; None: no move
    ends it sooner."""
    source = max(ledger.works, key=lambda place: (ledger.ends[place], -place))
    here = ledger.growing[source]
    if any(shift.target == source for shift in ledger.shifts) or not _is_above_knee(ledger, here):
        return None
    gave = {shift.source for shift in ledger.shifts}
    open_to = [
        place
        for place, instance in ledger.works.items()
        if instance.takes and place != source and place not in gave and ledger.has_room(place, ())
    ]
    least = TIMES_MOVES * ledger.cost.pause_s
    movable = [sample for sample in here if sample.moves and sample.left * ledger.step_s(1, sample.context) > least]
    for target in sorted(open_to, key=lambda place: (ledger.ends[place], place)):
        tried = [
            [Shift(sample, source, target) for sample in members]
            for members in _tried(movable, len(here) - len(ledger.growing[target]))
            if ledger.has_room(target, members)
        ]
        if tried:
            ends = [max(ledger.end(place, shifts) for place in (source, target)) for shifts in tried]
            best = min(range(len(tried)), key=lambda k: (ends[k], len(tried[k]), k))
            return tried[best] if ends[best] < (1 - EQUAL) * ledger.ends[source] else None
    return None


def _is_above_knee(ledger: _Ledger, here: Sequence[UnfinishedSample]) -> bool:
    if not here:
        return False
    running = here[: ledger.slots]
    context = sum(sample.context for sample in running) / len(running)
    return len(here) > knee(ledger.step_s, len(running), context) or len(here) > ledger.slots


def _tried(movable: Sequence[UnfinishedSample], difference: int) -> Iterator[list[UnfinishedSample]]:
    """Sets of 1, 2, 4, … samples, up to half of the difference: those with the most left, with the least, and evenly
    of all; of equals those with the shortest context."""
    order = sorted(movable, key=lambda sample: (-sample.left, sample.context, sample.key))
    most, count = min(len(order), max(1, difference // 2)), 1
    while count <= most:
        yield order[:count]
        yield order[-count:]
        yield [order[(2 * i + 1) * len(order) // (2 * count)] for i in range(count)]
        count *= 2
