"""Seconds of generation: steps of continuous batching as samples start, run and end. Torch-free.

Which samples run together follows from their lengths alone (`profile`): `running` at a time, the next as soon as one
has ended. How long a step takes follows from how many run and how long their contexts are (`Decoding.step`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.cost.drafts import NO_DRAFTS, Drafts
from plait.cost.layer_times import LayerTimes, Terms, added, scaled, total

if TYPE_CHECKING:
    from plait.cost.passes import Passes

Floats = NDArray[np.float64]

DRAFT_MODEL = "draft model"
"""The term of its seconds."""
LONGEST_PIECE = 64
"""Steps that are taken as equal at most."""


class SteadySteps(NamedTuple):
    """Steps in which the same samples run: so many steps, so many samples, response tokens that they have on average
    over these steps, all together."""

    steps: int
    running: int
    said: float


@lru_cache(maxsize=4096)
def profile(lengths: tuple[int, ...], running: int) -> tuple[SteadySteps, ...]:
    """
    Args:
        lengths: of the samples of one instance, in the order in which they start. The first token of each comes of its
            prompt, and takes no step of its own.
        running: samples that run at a time at most.
    """
    steps = [length - 1 for length in lengths if length > 1]
    ends = steps[:running]
    changes: dict[int, list[int]] = {0: [len(ends), 0]}
    """Step → (samples more than before, sum of the steps at which these began)."""

    def change(step: int, samples: int, begun: int) -> None:
        at = changes.setdefault(step, [0, 0])
        at[0] += samples
        at[1] += begun

    for end in ends:
        change(end, -1, 0)
    heapq.heapify(ends)
    for length in steps[running:]:
        start = heapq.heappop(ends)
        change(start, 1, start)
        change(start + length, -1, -start)
        heapq.heappush(ends, start + length)
    return _pieces(changes)


def _pieces(changes: dict[int, list[int]]) -> tuple[SteadySteps, ...]:
    pieces: list[SteadySteps] = []
    steps = sorted(changes)
    now = begun = 0
    for step, stop in itertools.pairwise(steps):
        now, begun = now + changes[step][0], begun + changes[step][1]
        while now and step < stop:
            length = min(LONGEST_PIECE, stop - step)
            pieces.append(SteadySteps(length, now, now * (step + (length + 1) / 2) - begun))
            step += length
    return tuple(pieces)


COARSE = 24
"""Pieces whose terms say what many are spent on."""


def coarse(pieces: Sequence[SteadySteps]) -> list[SteadySteps]:
    """Few pieces in place of many, each the mean of some that follow each other."""
    means = []
    for part in range(min(COARSE, len(pieces))):
        some = (
            pieces[len(pieces) * part // COARSE : len(pieces) * (part + 1) // COARSE]
            if len(pieces) > COARSE
            else [pieces[part]]
        )
        steps = sum(piece.steps for piece in some)
        running = round(sum(piece.steps * piece.running for piece in some) / steps)
        means.append(SteadySteps(steps, running, sum(piece.steps * piece.said for piece in some) / steps))
    return means


@dataclass(frozen=True)
class Drafting:
    """What is drafted and computed of next tokens, and the draft model that drafts, whole on one device; None: none
    does."""

    drafts: Drafts = NO_DRAFTS
    model: Passes | None = None

    @property
    def times(self) -> tuple[LayerTimes, ...]:
        """Those of the draft model, where it drafts."""
        return () if self.model is None or not self.drafts.passes else (self.model.times,)

    def seconds(self, rows: float, context: float) -> float:
        """In a step of so many samples, whose contexts have so many tokens together."""
        if self.model is None or not self.drafts.passes:
            return 0.0
        (kinds,) = self.model.layers(lambda kind: total(kind.decode_layer(rows, context)))
        layers = sum(count * layer_s for count, layer_s in kinds)
        return self.drafts.passes * (layers + self.model.times.drawing(rows))

    def seconds_of(self, rows: Floats, context: Floats) -> Floats:
        """`seconds` by a device's numbers, for many at once."""
        if self.model is None or not self.drafts.passes:
            return np.zeros_like(rows)
        return self.drafts.passes * decode_steps(self.model, rows, context, np.ones_like(rows))


@dataclass(frozen=True, eq=False)
class Pieces:
    """`SteadySteps`s of several instances, one instance after the other, as arrays, and where those of each begin.

    counts: each number of samples that run in some piece; which: [pieces] its place there
    """

    steps: Floats
    running: Floats
    said: Floats
    starts: NDArray[np.int64]
    counts: Sequence[int]
    which: NDArray[np.int64]

    @classmethod
    def of(cls, shares: Sequence[tuple[int, ...]], most: int) -> Pieces:
        """
        Args:
            shares: lengths of the samples of each instance; most: of them at a time.
        """
        by_instance = [profile(share, most) or (SteadySteps(0, 1, 0.0),) for share in shares]
        starts = np.cumsum([0, *(len(pieces) for pieces in by_instance[:-1])])
        steps, running, said = (np.array(column, float) for column in zip(*itertools.chain(*by_instance), strict=True))
        counts, which = np.unique(running, return_inverse=True)
        return cls(steps, running, said, starts, counts.astype(int).tolist(), which)


def dealt(lengths: Sequence[int], per_prompt: int, instances: int) -> list[tuple[int, ...]]:
    """Lengths of each instance's samples: prompts go round, with all of their samples, in an order that has nothing to
    do with lengths."""
    order = _scattered(len(lengths))
    mixed = [lengths[i] for i in order]
    prompts = [mixed[at : at + per_prompt] for at in range(0, len(mixed), per_prompt)]
    return [tuple(length for prompt in prompts[i::instances] for length in prompt) for i in range(instances)]


def _scattered(count: int) -> list[int]:
    """Every index once, neighbours far apart (multiples of the golden section, which fill an interval evenly)."""
    share = (5**0.5 - 1) / 2
    return sorted(range(count), key=lambda i: (i * share) % 1.0)


class Decoding:
    """What one instance takes to decode.

    Args:
        groups: of samples that go round the stages, of so many that run.
        drafting: of next tokens; the rank that has the first stage does it, before it begins with a step.
    """

    def __init__(
        self, passes: Passes, prompt_tokens: float, groups: Callable[[int], int], drafting: Drafting | None = None
    ) -> None:
        self._passes, self._prompt_tokens = passes, prompt_tokens
        self._groups, self._drafting = groups, drafting or Drafting()
        self.tokens = self._drafting.drafts.tokens
        """That a sample gets in a step."""

    def seconds(self, pieces: Sequence[SteadySteps]) -> Terms:
        """Seconds of all steps."""
        return added(*(scaled(self.step(piece.running, piece.said), piece.steps / self.tokens) for piece in pieces))

    def totals(self, pieces: Pieces) -> Floats:
        """Seconds of each instance's steps: `seconds` of its pieces, summed up, for all at once."""
        passes = self._passes
        if passes.times.profile is not None:
            steps = (self.step(int(n), tokens) for n, tokens in zip(pieces.running, pieces.said, strict=True))
            taken = np.fromiter(map(total, steps), float, len(pieces.steps))
        else:
            groups = np.array([self._groups(count) for count in pieces.counts], float)[pieces.which]
            samples = pieces.running / groups
            context = (pieces.running * self._prompt_tokens + pieces.said) / groups
            drafting = self._drafting.seconds_of(samples, context)
            taken = decode_steps(passes, samples * self._drafting.drafts.rows, context, groups, before=drafting)
        return np.add.reduceat(taken * pieces.steps, pieces.starts) / self.tokens

    def alone_s(self, length: int) -> float:
        """Seconds of a sample of so many tokens that runs by itself, behind its first token."""
        return (length - 1) * total(self.step(1, length / 2)) / self.tokens

    def step(self, running: int, said: float) -> Terms:
        """A step of `running` samples, which have said so many tokens together: one token more for each, and
        the draft tokens that are accepted."""
        passes, times = self._passes, self._passes.times
        work, sizes, software = times.work, times.layout.parallelism, times.cluster.software
        groups = self._groups(running)
        rows = running * self._drafting.drafts.rows / groups
        context = (running * self._prompt_tokens + said) / groups
        stages = passes.decode_stages(rows, context)
        stages[-1] = added(stages[-1], {"head": passes.of_stage(-1).drawing(rows)})
        if drafting := self._drafting.seconds(running / groups, context):
            stages[0] = added(stages[0], {DRAFT_MODEL: drafting})
        if sizes.pp == 1:
            return stages[0]
        seconds = [total(stage) for stage in stages]
        slowest = max(range(len(stages)), key=seconds.__getitem__)
        hops = sizes.pp * (times.traffic.hop(rows * work.shape.hidden * work.width) + software.hop_s)
        # A round is the way through all stages and hops, or the slowest stage's work for every group.
        busy = scaled(stages[slowest], groups)
        if sum(seconds) + hops <= groups * seconds[slowest]:
            return busy
        terms = added(*stages)
        terms["hops"] = hops
        return terms


def decode_steps(
    passes: Passes, rows: Floats, context: Floats, groups: Floats, *, before: Floats | float = 0.0
) -> Floats:
    """Seconds of steps of decoding by a device's numbers, for many at once: `groups` of as many rows go round the
    stages (`Decoding.step` has the terms).

    Args:
        before: seconds of the first stage, before each step.
    """
    times, software = passes.times, passes.times.cluster.software
    layers = passes.layers(lambda kind: _layer_s(kind, rows, context))
    stages = [reduce(np.add, (count * layer_s for count, layer_s in kinds)) for kinds in layers]
    stages[-1] = stages[-1] + _head_s(passes.of_stage(-1), rows)
    stages[0] = stages[0] + before
    if len(stages) == 1:
        return stages[0]
    row_bytes = times.work.shape.hidden * times.work.width
    fixed, per_row = (times.traffic.hop(count) for count in (0.0, row_bytes))
    way = sum(stages[1:], stages[0]) + len(stages) * (fixed + rows * (per_row - fixed) + software.hop_s)
    return np.maximum(way, groups * np.maximum.reduce(stages))


def _layer_s(times: LayerTimes, rows: Floats, context: Floats) -> Floats:
    work, tp, software = times.work, times.layout.parallelism.tp, times.cluster.software
    if times.window:
        context = np.minimum(context, rows * times.window)
    computing = (work.products(1) * rows + work.attention(1) * context) * times.share / times.flops_per_s
    read = work.read(rows, tp) + work.kept(1, tp) * context + work.states(rows, tp)
    layer = np.maximum(np.maximum(computing, read / times.bytes_per_s), software.layer_s)
    if tp > 1:
        row_bytes = work.shape.hidden * work.width
        fixed, per_row = (times.traffic.all_reduce("tp", count) for count in (0.0, row_bytes))
        layer = layer + 2 * (fixed + rows * (per_row - fixed))
    if work.lora.rank:
        layer = layer + work.adapter_s(rows, tp, times.flops_per_s, times.bytes_per_s)
    return layer


def _head_s(times: LayerTimes, rows: Floats) -> Floats:
    work, tp = times.work, times.layout.parallelism.tp
    return np.maximum(2 * rows * work.head / times.flops_per_s, work.head * work.width / times.bytes_per_s) / tp


def levelled(seconds: Sequence[float], least_s: float, speeds: Sequence[float]) -> float:
    """Seconds until instances that give each other samples end, all together: their work, shared by their speeds, but
    not less than `least_s`, nor more than the slowest one takes by itself.

    Args:
        seconds: that each instance would need for its own samples.
        least_s: the earliest time at which the last sample can end.
        speeds: of the instances, in any unit.
    """
    mean_s = sum(seconds) / len(seconds)
    if any(speed != speeds[0] for speed in speeds):
        mean_s = sum(own_s * speed for own_s, speed in zip(seconds, speeds, strict=True)) / sum(speeds)
    return min(max(seconds), max(least_s, mean_s))
