"""Seconds and bytes of generations whose prompts are computed on instances of their own. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil

from plait.cost.captures import capturing
from plait.cost.cluster import ClusterSpec
from plait.cost.costs import PROMPTS, CallCost, Spread, Tail, num_instances
from plait.cost.decoding import Decoding, levelled, profile
from plait.cost.endings import Endings
from plait.cost.generation_bytes import GenerationBytes
from plait.cost.instances import Instances
from plait.cost.layer_times import Terms, scaled, total
from plait.cost.passes import Passes
from plait.cost.prefill import Prefill
from plait.cost.prompts_apart import WAITING, Source, arrivals, drawn, least_s, sent_s, tokens_sent
from plait.cost.workload import Samples, Workload
from plait.layout.mesh import Layout


@dataclass(frozen=True)
class _Drawn:
    """What instances that draw do, in their order.

    terms:  of each that has samples; tails: of all
    shares: response lengths of the samples of each
    """

    terms: Sequence[Terms]
    tails: tuple[Tail, ...]
    shares: Sequence[Sequence[int]]


class GeneratingApart:
    """What generations of a workload take whose prompts are computed on instances of their own.

    Args:
        passes: as of `Generating`.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: ClusterSpec,
        passes: Callable[[str, Layout, Layout], Passes],
        instances: Instances,
        prefill: Prefill,
        taken: GenerationBytes,
    ) -> None:
        self._workload, self._cluster, self._passes = workload, cluster, passes
        self._instances, self._prefill, self._bytes = instances, prefill, taken
        self._endings = Endings(workload)
        self._drawn = cache(self._drawn_by_all)

    def drawing(self, role: str, samples: Samples, layout: Layout, apart: Spread) -> CallCost:
        """What the instances of a layout take that draw, from the first prompt to the last token of any."""
        found, dp, first = self._drawn(role, samples, apart), layout.parallelism.dp, apart.first_of(layout)
        mine = found.terms[first : first + dp]
        seconds = [total(terms) for terms in mine]
        terms = max(mine, key=total, default={})
        most = max(map(len, found.shares))
        running = self._instances.running(role, layout, most)
        first_s = self._endings.first_s(terms, samples, found.shares, running)
        idle = (0.0,) * (dp - len(mine))
        cost = CallCost(total(terms), terms, 0, (), (*seconds, *idle), found.tails, first_s)
        sent = self._sent(num_instances(apart.prompts), ceil(samples.prompts / num_instances(apart.samples)))
        return self._bytes.of(role, layout, running, min(most, self._workload.max_running), sent=sent).told(cost)

    def prompts(self, role: str, samples: Samples, layout: Layout, apart: Spread) -> CallCost:
        """What the instances of a layout take that compute prompts."""
        first = apart.first_of(layout)
        sources = self._sources(role, samples, apart.samples[0], apart)[first : first + layout.parallelism.dp]
        seconds = tuple(source.end_s for source in sources)
        held = ceil(samples.prompts / num_instances(apart.prompts))
        sent = self._sent(num_instances(apart.samples), held)
        slowest = max(sources, key=lambda source: source.end_s)
        terms = {PROMPTS: slowest.seconds} | ({"packing": slowest.begun_s} if slowest.begun_s else {})
        cost = CallCost(total(terms), terms, 0, (), seconds)
        return self._bytes.of(role, layout, held, held, sent=sent, draws=False).told(cost)

    def _drawn_by_all(self, role: str, samples: Samples, apart: Spread) -> _Drawn:
        """By all instances that draw: prompts go round."""
        workload = self._workload
        count = min(num_instances(apart.samples), samples.prompts)
        shares = self._instances.shares(samples, count)
        most = max(map(len, shares))
        terms: list[Terms] = []
        decodings: list[Decoding] = []
        of_instances: list[int] = []
        last_s = 0.0
        for layout in apart.samples:
            running = self._instances.running(role, layout, most)
            there_s = arrivals(self._sources(role, samples, layout, apart))
            groups, first = self._instances.groups(role, layout, running), len(terms)
            dp = min(layout.parallelism.dp, count - first)
            own = {n: instance for instance, numbers in self._instances.kinds(layout, dp) for n in numbers}
            for number in range(dp):
                passes, drafting = (
                    self._passes(role, own[number], layout),
                    self._instances.drafting(own[number], layout),
                )
                decoding = self._instances.decoding(role, own[number], layout, groups)
                share, mine = shares[first + number], there_s[first + number :: count]
                begun = self._prefill.elsewhere(role, passes, len(mine), drafting)
                begun = begun | capturing(workload, (passes.times, *drafting.times), profile(share, running))
                terms.append(drawn(share, mine, running, decoding, begun))
                last_s = max(last_s, least_s(share, mine, decoding))
                decodings.append(decoding)
                of_instances.append(running)
        seconds = tuple(map(total, terms))
        slowest = max(range(count), key=seconds.__getitem__)
        if workload.rebalances and count > 1:
            longest = workload.lengths.responses.longest
            speeds = [
                decoding.tokens / total(decoding.step(running, running * longest / 2))
                for decoding, running in zip(decodings, of_instances, strict=True)
            ]
            seconds = (levelled(seconds, last_s, speeds),) * count
            terms = [_ending(some, seconds[0]) for some in terms]
        tails = self._endings.tails(seconds, shares, decodings[slowest], of_instances[slowest])
        return _Drawn(terms, tails, shares)

    def _sent(self, instances: int, prompts: int) -> int:
        """Tokens of so many prompts that are on their way to, or from, so many other instances at most."""
        return tokens_sent(
            self._workload.lengths.prompts.longest, prompts, self._workload.max_prefill_tokens, instances
        )

    def _sources(self, role: str, samples: Samples, target: Layout, apart: Spread) -> list[Source]:
        """All instances that compute prompts, which go round; what they send to instances of a layout."""
        workload, prompts = self._workload, self._workload.lengths.prompts
        copies: list[tuple[Layout, Layout]] = []
        for layout in apart.prompts:
            dp = layout.parallelism.dp
            own = {n: instance for instance, numbers in self._instances.kinds(layout, dp) for n in numbers}
            copies += [(layout, own[number]) for number in range(dp)]
        sources = []
        for number, (layout, instance) in enumerate(copies):
            count = len(range(number, samples.prompts, len(copies)))
            begun_s, seconds, passes = 0.0, 0.0, self._passes(role, instance, layout)
            if count:
                groups = self._instances.groups(role, layout, count)(count)
                begun_s = total(self._prefill.packing(role, passes.times))
                seconds = self._prefill.prompts_s(passes, count, groups)
            one_s = sent_s(self._cluster, instance, target, self._bytes.of_prompt(role, prompts.mean))
            sources.append(Source(count, seconds, prompts.mean, workload.max_prefill_tokens, one_s, begun_s))
        return sources


def _ending(terms: Terms, end_s: float) -> Terms:
    """With another end; what is waited before stays."""
    waited_s, whole_s = terms.get(WAITING, 0.0), total(terms)
    if whole_s <= waited_s:
        return terms
    return {**scaled(terms, (end_s - waited_s) / (whole_s - waited_s)), WAITING: waited_s}
