"""Seconds and bytes of a generation: prompts, steps of decoding, weights that are packed, the pool of keys and values,
and what instances have to spare at its end. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from plait.cost.captures import capturing
from plait.cost.costs import CallCost, LateTails, Spread, num_instances
from plait.cost.decoding import Decoding, Pieces, coarse, levelled, profile
from plait.cost.endings import Endings
from plait.cost.generation_bytes import GenerationBytes, GenerationMemory
from plait.cost.instances import Instances
from plait.cost.layer_times import Terms, added, scaled, total
from plait.cost.passes import Passes
from plait.cost.prefill import Prefill
from plait.cost.workload import Samples, Workload
from plait.layout.mesh import Layout


@dataclass(frozen=True)
class _Drawing:
    """One instance with its share of the samples.

    begin:     terms before it decodes
    decoded_s: seconds of its steps
    running:   samples that it decodes at a time
    speed:     one by the seconds in which it would decode all samples
    """

    begin: Terms
    decoded_s: float
    decoding: Decoding
    running: int
    speed: float

    @property
    def seconds(self) -> float:
        return total(self.begin) + self.decoded_s

    def terms(self, share: tuple[int, ...]) -> Terms:
        """What its seconds are spent on.

        Args:
            share: lengths of its samples.
        """
        steps = self.decoding.seconds(coarse(profile(share, self.running)))
        if self.decoded_s > 0:
            steps = scaled(steps, self.decoded_s / total(steps))
        return added(self.begin, steps)


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
        prefill: Prefill,
        taken: GenerationBytes,
    ) -> None:
        self._workload, self._passes, self._endings = workload, passes, Endings(workload)
        self._instances, self._prefill, self._bytes = instances, prefill, taken
        self._pieces = cache(lambda samples, count, running: Pieces.of(self._instances.shares(samples, count), running))

    def cost(
        self, role: str, samples: Samples, layout: Layout, spread: Spread, held_bytes: Sequence[int | None] = ()
    ) -> CallCost:
        """What the instances of a layout take, of all those that share the samples.

        Args:
            held_bytes: of each layout that draws, weights and optimizer state on the fullest device; none: the weights
                of that layout alone.
        """
        workload, dp = self._workload, layout.parallelism.dp
        shares = self._shares(samples, spread)
        drawing = self._drawing(role, samples, spread.samples, held_bytes or (None,) * len(spread.samples), shares)
        ends_s = [one.seconds for one in drawing]
        last = drawing[max(range(len(drawing)), key=ends_s.__getitem__)]
        if workload.rebalances and len(drawing) > 1:
            least_s = last.decoding.alone_s(workload.lengths.responses.longest)
            ends_s = [levelled(ends_s, least_s, [one.speed for one in drawing])] * len(drawing)
        tails = LateTails(partial(self._endings.tails, ends_s, shares, last.decoding, last.running))
        first, most, terms = spread.first_of(layout), max(map(len, shares)), Terms()
        running = self._running(role, layout, spread, held_bytes, most)
        if mine := range(first, min(first + dp, len(drawing))):
            longest = max(mine, key=lambda number: drawing[number].seconds)
            terms = drawing[longest].terms(shares[longest])
            if ends_s[longest] != drawing[longest].seconds:
                terms = scaled(terms, ends_s[longest] / drawing[longest].seconds)
        seconds = (*ends_s[first : first + dp], *(0.0,) * (dp - len(mine)))
        first_s = self._endings.first_s(terms, samples, shares, running)
        cost = CallCost(total(terms), terms, 0, (), seconds, tails, first_s)
        return self.memory(role, samples, layout, spread, held_bytes).told(cost)

    def memory(
        self, role: str, samples: Samples, layout: Layout, spread: Spread, held_bytes: Sequence[int | None] = ()
    ) -> GenerationMemory:
        """What the devices of a layout hold; arguments as of `cost`."""
        most = max(map(len, self._shares(samples, spread)))
        running = self._running(role, layout, spread, held_bytes, most)
        return self._bytes.of(role, layout, running, min(most, self._workload.max_running))

    def _shares(self, samples: Samples, spread: Spread) -> Sequence[tuple[int, ...]]:
        """Lengths of the samples of each instance that has some."""
        return self._instances.shares(samples, min(num_instances(spread.samples), samples.prompts))

    def _running(self, role: str, layout: Layout, spread: Spread, held_bytes: Sequence[int | None], share: int) -> int:
        """Samples that an instance of a layout decodes at a time, of so many that it has."""
        own_bytes = held_bytes[spread.samples.index(layout)] if held_bytes else None
        return self._instances.running(role, layout, share, own_bytes)

    def _drawing(
        self,
        role: str,
        samples: Samples,
        layouts: Sequence[Layout],
        held_bytes: Sequence[int | None],
        shares: Sequence[tuple[int, ...]],
    ) -> list[_Drawing]:
        """All instances that have samples, in the order of the layouts; prompts go round."""
        workload, count, drawing = self._workload, len(shares), dict[int, _Drawing]()
        for layout, num_bytes in zip(layouts, held_bytes, strict=True):
            first = len(drawing)
            if (own := min(layout.parallelism.dp, count - first)) < 1:
                break
            running = self._instances.running(role, layout, max(map(len, shares)), num_bytes)
            groups = self._instances.groups(role, layout, running)
            for instance, numbers in self._instances.kinds(layout, own):
                passes, drafting = self._passes(role, instance, layout), self._instances.drafting(instance, layout)
                decoding = Decoding(passes, workload.lengths.prompts.mean, groups, drafting)
                sizes = {len(shares[first + number]) for number in numbers}
                begun = {size: self._prefill.seconds(role, passes, samples, size, groups, drafting) for size in sizes}
                totals = decoding.totals(self._pieces(samples, count, running)).tolist()
                for number in (first + n for n in numbers):
                    captures = capturing(workload, (passes.times, *drafting.times), profile(shares[number], running))
                    speed = 1 / sum(totals) if any(totals) else 1.0
                    begin = begun[len(shares[number])] | captures
                    drawing[number] = _Drawing(begin, totals[number], decoding, running, speed)
        return [drawing[number] for number in range(count)]

    def step_line(self, role: str, samples: Samples, layout: Layout, instances: int) -> tuple[float, float, float]:
        """Seconds of an instance with one sample until that has a token more, and more for each further one, about;
        tokens that a sample gets in a decode step. Of instances on devices of several kinds the slowest.

        Args:
            instances: that share the samples, those of this layout and others.
        """
        shares = self._instances.shares(samples, min(instances, samples.prompts))
        running = self._instances.running(role, layout, max(map(len, shares)))
        own = min(layout.parallelism.dp, samples.prompts)
        groups, kinds = self._instances.groups(role, layout, running), self._instances.kinds(layout, own)
        decodings = (self._instances.decoding(role, kind, layout, groups) for kind, _ in kinds)
        return max((*self._endings.line(decoding, running), decoding.tokens) for decoding in decodings)

    def groups(self, role: str, layout: Layout, share: int) -> int:
        """Groups that go round the stages of an instance with so many samples, while as many of them run as can."""
        running = self._instances.running(role, layout, share)
        return self._instances.groups(role, layout, running)(running)
