"""Seconds of drawing where other instances compute the prompts: samples begin as their prompts come. Torch-free."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from plait.cost.cluster import ClusterSpec
from plait.cost.decoding import LONGEST_PIECE, Decoding
from plait.cost.layer_times import Terms, added, scaled, total
from plait.layout.mesh import Layout

WAITING = "waiting for prompts"
"""The term of seconds in which an instance has nothing to draw yet."""
STEPS_OF_A_WAY = 2
"""Steps of the instance that draws until a prompt that is there has its first token."""


def tokens_sent(longest: int, prompts: int, most: int, instances: int) -> int:
    """Tokens of an instance's prompts that are on their way at the same time, at most: a load for each instance at the
    other end (`policy.prompt_pace`).

    Args:
        longest: of a prompt; prompts: how many there are; most: of several prompts in a load.
    """
    return min(longest * prompts, instances * max(longest, most))


def sent_s(cluster: ClusterSpec, source: Layout, target: Layout, num_bytes: float) -> float:
    """Seconds in which one instance sends so many bytes to another: as many pairs of ranks as both have send parts of
    them, over links of their own within a node, over one that they share between nodes.

    Args:
        source: an instance; target: all of those that draw.
    """
    ranks, sizes = (*source.mesh.ranks, *target.mesh.ranks), target.parallelism
    some, nodes = cluster.among(ranks), {rank // cluster.devices_per_node for rank in ranks}
    pairs = min(len(source.mesh.ranks), sizes.tp * sizes.pp)
    link, lanes = (some.near, pairs) if len(nodes) == 1 else (some.inter, 1)
    return link.latency_s + num_bytes / (link.bandwidth * some.software.links * lanes)


@dataclass(frozen=True)
class Source:
    """An instance that computes prompts.

    prompts: how many; seconds: of all of them
    tokens:  of one; most: of a step
    sent_s:  until keys and values of one are where samples are drawn
    begun_s: before it computes the first
    """

    prompts: int
    seconds: float
    tokens: float
    most: int
    sent_s: float
    begun_s: float = 0.0

    @property
    def end_s(self) -> float:
        """When all are computed."""
        return self.begun_s + self.seconds


def arrivals(sources: Sequence[Source]) -> list[float]:
    """When each prompt is where its samples are drawn, ascending. What a step has computed goes together, behind what
    was sent before."""
    there_s = []
    for source in sources:
        ends = Counter(ceil((place + 1) * source.tokens / source.most) for place in range(source.prompts))
        before_s = 0.0
        for step, count in sorted(ends.items()):
            computed = min(1.0, step * source.most / (source.prompts * source.tokens))
            before_s = max(before_s, source.begun_s + computed * source.seconds) + count * source.sent_s
            there_s += [before_s] * count
    return sorted(there_s)


def way_s(decoding: Decoding) -> float:
    """Seconds until a prompt that is there has its first token."""
    return STEPS_OF_A_WAY * total(decoding.step(1, 0)) / decoding.tokens


def least_s(lengths: Sequence[int], there_s: Sequence[float], decoding: Decoding) -> float:
    """Before which samples cannot all have ended, however many instances share them; arguments as of `drawn`."""
    last_s = {max(some): at_s for at_s, some in _coming(lengths, there_s)}  # of prompts whose longest sample is as long
    return way_s(decoding) + max(at_s + decoding.alone_s(longest) for longest, at_s in last_s.items())


def _coming(lengths: Sequence[int], there_s: Sequence[float]) -> Iterator[tuple[float, Sequence[int]]]:
    """When each prompt comes, and the lengths of its samples."""
    per_prompt = len(lengths) // len(there_s)
    samples = (lengths[at : at + per_prompt] for at in range(0, len(lengths), per_prompt))
    return zip(there_s, samples, strict=True)


def drawn(
    lengths: Sequence[int], there_s: Sequence[float], running: int, decoding: Decoding, begun: Terms | None = None
) -> Terms:
    """Seconds of an instance that draws, by terms, from the beginning of the call to its last token.

    Args:
        lengths: of its samples, those of a prompt next to each other. The first token of each takes no step of its own.
        there_s: when each of its prompts comes, ascending.
        running: samples that run at a time at most.
        begun: before it can draw.
    """
    on_the_way_s = way_s(decoding)
    coming = deque((at_s + on_the_way_s, some) for at_s, some in _coming(lengths, there_s))
    terms: list[Terms] = [begun or {}]
    now_s, step = total(terms[0]), 0
    waiting: deque[int] = deque()
    runs: list[tuple[int, int]] = []
    """(step at which it ends, at which it began) of each sample."""
    begins = 0
    """The sum of the steps at which these began."""
    while coming or waiting or runs:
        while coming and coming[0][0] <= now_s:
            waiting.extend(length - 1 for length in coming.popleft()[1] if length > 1)
        while waiting and len(runs) < running:
            heapq.heappush(runs, (step + waiting.popleft(), step))
            begins += step
        if not runs:
            if coming:
                terms.append({WAITING: coming[0][0] - now_s})
                now_s = coming[0][0]
            continue
        count, taken = len(runs), min(LONGEST_PIECE, runs[0][0] - step)
        said = count * step - begins
        if coming and count < running:
            first_s = total(decoding.step(count, said + count)) / decoding.tokens
            taken = min(taken, max(1, ceil((coming[0][0] - now_s) / first_s)))
        piece = scaled(decoding.step(count, said + count * (taken + 1) / 2), taken / decoding.tokens)
        terms.append(piece)
        now_s, step = now_s + total(piece), step + taken
        while runs and runs[0][0] <= step:
            begins -= heapq.heappop(runs)[1]
    return added(*terms)
