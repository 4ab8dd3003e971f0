"""Seconds and bytes of a generation: prompts, steps of decoding, weights that are packed, the pool of keys and values,
and what instances have to spare at its end. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import ceil

from plait.cost.beginning import Beginning
from plait.cost.captures import capturing
from plait.cost.cluster import ClusterSpec
from plait.cost.costs import CallCost, Tail
from plait.cost.decoding import Decoding, Guessing, Pieces, coarse, dealt, levelled, profile
from plait.cost.generation_bytes import GenerationBytes
from plait.cost.generation_memory import kv_bytes_per_token
from plait.cost.layer_times import LayerTimes, Terms, added, scaled, total
from plait.cost.model_work import ModelWork
from plait.cost.passes import Passes
from plait.cost.profile import Profile
from plait.cost.prompts_apart import Source, arrivals, drawn, sent_s, tokens_sent
from plait.cost.workload import Samples, Workload
from plait.layout.mesh import Layout, Mesh, Parallelism
from plait.models.shape import ModelShape
from plait.policy.decode_ring import COSTS, GroupRule
from plait.policy.migration import STEPS_OF_A_MOVE
from plait.policy.threshold import Rollout, outcomes

SHARES = (16, 4)
"""Parts of a rollout's samples that are unfinished when the last are gathered, as far as it is foretold."""


class Generating:
    """What generations of a workload take.

    Args:
        shapes: role → the shape of its model.
        passes: of a role over the layout of an instance, and that of all instances.
        held_bytes: of a role's weights on a device of each stage.
        profile: as of `ModelCosts`.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: ClusterSpec,
        shapes: Mapping[str, ModelShape],
        passes: Callable[[str, Layout, Layout], Passes],
        held_bytes: Callable[[str, Parallelism], tuple[int, ...]],
        profile: Profile | None,
    ) -> None:
        self._workload, self._cluster, self._shapes = workload, cluster, shapes
        self._passes, self._held = passes, held_bytes
        self._profile, self._bytes = profile, GenerationBytes(workload, cluster, shapes)
        self._beginning = Beginning(workload, shapes, held_bytes, profile)
        self._measured_groups = cache(self._measured_groups_of)
        self._shares = cache(self._shares_of)
        self._pieces = cache(lambda samples, count, running: Pieces.of(self._shares(samples, count), running))

    def cost(self, role: str, samples: Samples, layout: Layout, *, held_bytes: int | None = None) -> CallCost:
        """
        Args:
            held_bytes: weights and optimizer state on the fullest device; None: the weights of this layout alone.
        """
        workload = self._workload
        count = min(layout.parallelism.dp, samples.prompts)
        shares = self._shares(samples, count)
        running = self._running(role, layout, max(map(len, shares)), held_bytes)
        groups = self._groups(role, layout, running)
        begins: list[Terms] = [{}] * count
        decodings: list[Decoding | None] = [None] * count
        decoded, speeds = [0.0] * count, [1.0] * count
        for instance, numbers in self._kinds(layout, count):
            passes, guessing = self._passes(role, instance, layout), self._guessing(instance, layout)
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
        spare = self._tails(seconds, shares, decoding, running)
        idle = (0.0,) * (layout.parallelism.dp - count)
        first_s, most = self._first_s(terms, samples, shares, running), max(map(len, shares))
        cost = CallCost(total(terms), terms, 0, (), seconds + idle, spare, first_s)
        return self._bytes.told(cost, role, layout, running, min(most, workload.max_running))

    def apart(self, role: str, samples: Samples, layout: Layout, computing: Sequence[Layout]) -> CallCost:
        """As `cost`, of instances that draw where those of other layouts compute the prompts (`prompts_apart`)."""
        workload, parallelism = self._workload, layout.parallelism
        count = min(parallelism.dp, samples.prompts)
        shares = self._shares(samples, count)
        most = max(map(len, shares))
        running = self._running(role, layout, most)
        groups = self._groups(role, layout, running)
        sources = self._sources(role, samples, layout, computing)
        there_s = arrivals(sources)
        terms: list[Terms] = [{}] * count
        decodings: list[Decoding] = []
        for instance, numbers in self._kinds(layout, count):
            passes, guessing = self._passes(role, instance, layout), self._guessing(instance, layout)
            decodings.append(Decoding(passes, workload.lengths.prompts.mean, groups, guessing))
            for number in numbers:
                mine, share = there_s[number::count], shares[number]
                pieces = profile(share, running)
                begun = self._beginning.elsewhere(role, passes, len(mine), guessing)
                begun = begun | capturing(workload, (passes.times, *guessing.times), pieces)
                terms[number] = drawn(share, mine, running, decodings[-1], begun)
        seconds = tuple(map(total, terms))
        longest = max(range(count), key=seconds.__getitem__)
        spare = self._tails(seconds, shares, decodings[-1], running)
        first_s, idle = self._first_s(terms[longest], samples, shares, running), (0.0,) * (parallelism.dp - count)
        cost = CallCost(seconds[longest], terms[longest], 0, (), seconds + idle, spare, first_s)
        sent = self._sent(len(sources), ceil(samples.prompts / count))
        return self._bytes.told(cost, role, layout, running, min(most, workload.max_running), sent=sent)

    def prompts(self, role: str, samples: Samples, layout: Layout, drawing: Sequence[Layout]) -> CallCost:
        """What instances take that compute all prompts for those of other layouts, which draw."""
        sources = self._sources(role, samples, (*drawing, layout)[0], [layout])
        seconds, context = max(source.seconds for source in sources), self._workload.lengths.prompts.longest
        held, targets = sources[0].prompts, sum(other.parallelism.dp for other in drawing)
        cost = CallCost(seconds, {"prompts": seconds}, 0, (), tuple(source.seconds for source in sources))
        return self._bytes.told(cost, role, layout, held, held, context=context, sent=self._sent(targets, held))

    def _sent(self, instances: int, prompts: int) -> int:
        """Tokens of so many prompts that are on their way to, or from, so many other instances at most."""
        return tokens_sent(
            self._workload.lengths.prompts.longest, prompts, self._workload.max_prefill_tokens, instances
        )

    def _sources(self, role: str, samples: Samples, layout: Layout, computing: Sequence[Layout]) -> list[Source]:
        """The instances that compute prompts, which go round."""
        workload, prompts = self._workload, self._workload.lengths.prompts
        prompt_bytes = kv_bytes_per_token(self._shapes[role], workload.dtype) * prompts.mean
        copies = [
            (other, instance)
            for other in computing
            for instance, numbers in self._kinds(other, other.parallelism.dp)
            for _ in numbers
        ]
        sources = []
        for number, (other, instance) in enumerate(copies):
            if not (count := len(range(number, samples.prompts, len(copies)))):
                continue
            passes, sizes = self._passes(role, instance, other), other.parallelism
            begun = self._beginning.packing(role, passes.times)
            seconds = total(begun) + self._beginning.prompts_s(passes, count, self._groups(role, other, count)(count))
            senders = min(sizes.tp * sizes.pp, len(layout.mesh.ranks) // layout.parallelism.dp)
            steps = ceil(count * prompts.mean / workload.max_prefill_tokens)
            sources.append(
                Source(count, seconds, steps, sent_s(self._cluster, instance, layout, prompt_bytes / senders))
            )
        return sources

    def _shares_of(self, samples: Samples, count: int) -> list[tuple[int, ...]]:
        """Response lengths of each of so many instances."""
        return dealt(self._workload.lengths.responses.of(samples.count), samples.per_prompt, count)

    def _kinds(self, layout: Layout, count: int) -> list[tuple[Layout, Sequence[int]]]:
        """An instance on each kind of devices, of the first so many, and the numbers of those that are as it is."""
        copies = self._cluster.copies_of(layout)
        if not copies:
            return [(_instance(layout), range(count))]
        return [(copy, some) for copy, numbers in copies if (some := [n for n in numbers if n < count])]

    def _guessing(self, instance: Layout, layout: Layout) -> Guessing:
        """A draft model is whole on one device of each instance."""
        workload, count = self._workload, layout.parallelism.dp
        shape = workload.draft_model
        if workload.guesses_whole and len(layout.mesh.ranks) > count:
            return Guessing()
        if shape is None:
            return Guessing(workload.drafts)
        work = ModelWork(shape, workload.dtype, shape.vocabulary)
        ranks = layout.mesh.ranks
        devices = Layout(Mesh(ranks[:count]), Parallelism(count))
        alone = Layout(Mesh(instance.mesh.ranks[:1]), Parallelism())
        cluster = self._cluster.among(alone.mesh.ranks)
        return Guessing(workload.drafts, Passes(LayerTimes(cluster, work, alone, self._profile, devices)))

    def _first_s(self, terms: Terms, samples: Samples, shares: Sequence[Sequence[int]], running: int) -> float:
        """When prompts that began first have all their samples: the longest of one prompt's."""
        responses = self._workload.lengths.responses
        longest = responses.of(samples.per_prompt)[-1] / responses.longest
        return total(terms) * longest * min(1.0, running / max(map(len, shares)))

    def _tails(
        self, seconds: Sequence[float], shares: Sequence[Sequence[int]], decoding: Decoding, running: int
    ) -> tuple[Tail, ...]:
        """What instances have to spare as they are, and when the last samples are gathered on few of them."""
        if len(seconds) < 2:
            return ()
        end = max(seconds)
        spare = Tail(end, sum(end - instance_s for instance_s in seconds))
        if not self._workload.gathers:
            return (spare,)
        low, slope = self._line(decoding, min(running, max(map(len, shares))))
        step_s = lambda count: low + slope * (count - 1)
        move_s = STEPS_OF_A_MOVE * low * decoding.tokens
        rollout = Rollout(len(shares), step_s, 0.0, self._workload.max_running, move_s)
        # Of an instance with more samples than run at once, as many as are among the last.
        last = [[length - 1 for length in sorted(share)[:: -(-len(share) // running)]] for share in shares]
        count = sum(map(len, last))
        serial, *gathering = outcomes(rollout, last, (0, *(count // part for part in SHARES)))
        tails = [spare]
        for gathered in gathering:
            if gathered.migrated_s is not None:
                later, more = gathered.generation_s - serial.generation_s, gathered.free_s - serial.free_s
                tails.append(Tail(end + later, spare.idle_s + more, rollout.migration_s))
        return tuple(tails)

    def step_line(self, role: str, samples: Samples, layout: Layout) -> tuple[float, float, float]:
        """Seconds of an instance with one sample until that has a token more, and more for each further one, about;
        tokens that a sample gets in a decode step. Of instances on devices of several kinds the slowest."""
        count = min(layout.parallelism.dp, samples.prompts)
        running = self._running(role, layout, max(map(len, self._shares(samples, count))))
        groups, prompt_tokens = self._groups(role, layout, running), self._workload.lengths.prompts.mean
        decodings = (
            Decoding(self._passes(role, kind, layout), prompt_tokens, groups, self._guessing(kind, layout))
            for kind, _ in self._kinds(layout, count)
        )
        return max((*self._line(decoding, running), decoding.tokens) for decoding in decodings)

    def _line(self, decoding: Decoding, most: int) -> tuple[float, float]:
        """As `step_line`, by steps of one sample and of so many that have said half of what they may."""
        response_tokens = self._workload.lengths.responses.longest / 2
        low, high = (total(decoding.step(count, count * response_tokens)) / decoding.tokens for count in (1, most))
        return low, (high - low) / max(1, most - 1)

    def groups(self, role: str, layout: Layout, share: int) -> int:
        """Groups that go round the stages of an instance with so many samples, while as many of them run as can."""
        running = self._running(role, layout, share)
        return self._groups(role, layout, running)(running)

    def _groups(self, role: str, layout: Layout, most: int) -> Callable[[int], int]:
        """Groups of samples that go round the stages of an instance at the same time, of so many that run.

        Args:
            most: samples that run at once.
        """
        stages, stated = layout.parallelism.pp, self._workload.stated_groups
        per_stage = self._cluster.software.decode_groups_per_stage
        if per_stage is not None:
            stated = per_stage * stages
        elif stated is None and self._profile is not None and stages > 1:
            stated = self._measured_groups(role, layout, most)
        return GroupRule(stages, COSTS[self._workload.device], stated).groups

    def _measured_groups_of(self, role: str, layout: Layout, running: int) -> int:
        """The number with the shortest round of so many samples that have said half of what they say, the fewest among
        equals; as `decode_ring.num_groups`, by the seconds of stages and hops."""
        lengths, passes = self._workload.lengths, self._passes(role, _instance(layout), layout)

        def round_s(count: int) -> float:
            decoding = Decoding(
                passes, lengths.prompts.mean, lambda _: count, self._guessing(_instance(layout), layout)
            )
            return total(decoding.step(running, running * lengths.responses.mean / 2))

        counts = range(1, min(running, layout.parallelism.pp + 1) + 1)
        return min(counts, key=lambda count: (round_s(count) * (1 + 1e-12 * count), count))

    def _running(self, role: str, layout: Layout, share: int, held_bytes: int | None = None) -> int:
        """Samples that an instance decodes at a time. `held_bytes` as of `cost`."""
        workload, sizes = self._workload, layout.parallelism
        root = 0 if self._shapes[role].recurrent else workload.held_root
        own_tokens = ceil(workload.lengths.prompts.mean + workload.lengths.responses.mean) - root
        running = min(share, workload.max_running)
        if workload.kv_tokens is not None:
            running = min(running, (workload.kv_tokens - root) // own_tokens)
        if pool := self._cluster.software.pool_share:
            if held_bytes is None:
                held_bytes = max(self._held(role, Parallelism(1, sizes.tp, sizes.pp, sizes.stages)))
            room = pool * self._cluster.among(layout.mesh.ranks).device.memory_bytes - held_bytes
            of_token = max(1, *self._bytes.of_token(role, layout))
            running = min(running, int((room / of_token - root) / own_tokens))
        return max(1, running)


def _instance(layout: Layout) -> Layout:
    """The first of its copies."""
    sizes = layout.parallelism
    ranks = layout.mesh.ranks[: sizes.tp * sizes.pp]
    return Layout(Mesh(ranks), Parallelism(1, sizes.tp, sizes.pp, sizes.stages))
