"""Seconds and bytes of a generation: prompts, steps of decoding, weights that are packed, the pool of keys and values,
and what instances have to spare at its end. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from plait.cost.beginning import Beginning
from plait.cost.captures import capturing
from plait.cost.costs import CallCost
from plait.cost.decoding import Decoding, Pieces, coarse, levelled, profile
from plait.cost.endings import Endings
from plait.cost.generation_bytes import GenerationBytes
from plait.cost.instances import Instances
from plait.cost.layer_times import Terms, added, scaled, total
from plait.cost.passes import Passes
from plait.cost.workload import Samples, Workload
from plait.layout.mesh import Layout


class Generating:
    """What generations of a workload take.

    Args:
        passes: of a role over the layout of an instance, and that of all instances.
    """

    def __init__(
        self,
        workload: Workload,
        passes: Callable[[str, Layout, Layout], Passes],
        instances: Instances,
        beginning: Beginning,
        taken: GenerationBytes,
    ) -> None:
        self._workload, self._passes, self._endings = workload, passes, Endings(workload)
        self._instances, self._beginning, self._bytes = instances, beginning, taken
        self._pieces = cache(lambda samples, count, running: Pieces.of(self._instances.shares(samples, count), running))

    def cost(self, role: str, samples: Samples, layout: Layout, *, held_bytes: int | None = None) -> CallCost:
        """
        Args:
            held_bytes: weights and optimizer state on the fullest device; None: the weights of this layout alone.
        """
        workload = self._workload
        count = min(layout.parallelism.dp, samples.prompts)
        shares = self._instances.shares(samples, count)
        running = self._instances.running(role, layout, max(map(len, shares)), held_bytes)
        groups = self._instances.groups(role, layout, running)
        begins: list[Terms] = [{}] * count
        decodings: list[Decoding | None] = [None] * count
        decoded, speeds = [0.0] * count, [1.0] * count
        for instance, numbers in self._instances.kinds(layout, count):
            passes, guessing = self._passes(role, instance, layout), self._instances.guessing(instance, layout)
            decoding = Decoding(passes, workload.lengths.prompts.mean, groups, guessing)
            sizes = {len(shares[number]) for number in numbers}
            begun = {size: self._beginning.seconds(role, passes, samples, size, groups, guessing) for size in sizes}
            totals = decoding.totals(self._pieces(samples, count, running)).tolist()
            for number in numbers:
                captures = capturing(workload, (passes.times, *guessing.times), profile(shares[number], running))
                begins[number], decodings[number] = begun[len(shares[number])] | captures, decoding
                decoded[number], speeds[number] = totals[number], 1 / sum(totals) if any(totals) else 1.0
        seconds = tuple(total(first) + other for first, other in zip(begins, decoded, strict=True))
        longest = max(range(count), key=seconds.__getitem__)
        decoding = decodings[longest]
        assert decoding is not None, "every instance is of some kind"
        steps = decoding.seconds(coarse(profile(shares[longest], running)))
        if decoded[longest] > 0:
            steps = scaled(steps, decoded[longest] / total(steps))
        terms = added(begins[longest], steps)
        if workload.rebalances and count > 1:
            seconds, terms = levelled(seconds, terms, decoding, workload.lengths.responses.longest, speeds)
        spare = self._endings.tails(seconds, shares, decoding, running)
        idle = (0.0,) * (layout.parallelism.dp - count)
        first_s, most = self._endings.first_s(terms, samples, shares, running), max(map(len, shares))
        cost = CallCost(total(terms), terms, 0, (), seconds + idle, spare, first_s)
        return self._bytes.told(cost, role, layout, running, min(most, workload.max_running))

    def step_line(self, role: str, samples: Samples, layout: Layout) -> tuple[float, float, float]:
        """Seconds of an instance with one sample until that has a token more, and more for each further one, about;
        tokens that a sample gets in a decode step. Of instances on devices of several kinds the slowest."""
        count = min(layout.parallelism.dp, samples.prompts)
        running = self._instances.running(role, layout, max(map(len, self._instances.shares(samples, count))))
        groups, kinds = self._instances.groups(role, layout, running), self._instances.kinds(layout, count)
        decodings = (self._instances.decoding(role, kind, layout, groups) for kind, _ in kinds)
        return max((*self._endings.line(decoding, running), decoding.tokens) for decoding in decodings)

    def groups(self, role: str, layout: Layout, share: int) -> int:
        """Groups that go round the stages of an instance with so many samples, while as many of them run as can."""
        running = self._instances.running(role, layout, share)
        return self._instances.groups(role, layout, running)(running)
