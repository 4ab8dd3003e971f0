"""Mini-batches (what one optimizer step sees) and micro-batches (what one forward sees).

A mini-batch is part of the algorithm: a set of sample ids fixed by (seed, step, epoch), whatever runs it and in
whatever order samples arrived. A micro-batch is only a split of a mini-batch by memory: it changes the time, never
the result.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, pairwise
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class SampleSize:
    """One sample as packing sees it. Samples of one `group` share a prompt of `prompt_tokens`, behind the root."""

    group: Hashable
    prompt_tokens: int
    response_tokens: int
    root_tokens: int = 0
    """What all prompts begin with, the same number for all samples: computed once for each micro-batch."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one forward: each inner tuple holds indices of samples that share one computed prompt."""

    groups: tuple[tuple[int, ...], ...]
    num_tokens: int
    """Tokens of the packed row: the root, each group's prompt once, and every response."""
    root_tokens: int = 0
    """Those that all prompts begin with. One group alone has them in its prompt."""

    @classmethod
    def of(cls, groups: tuple[tuple[int, ...], ...], num_tokens: int, root_tokens: int) -> MicroBatch:
        """A micro-batch of samples whose prompts begin with a root."""
        return cls(groups, num_tokens, root_tokens if len(groups) > 1 else 0)

    @property
    def samples(self) -> tuple[int, ...]:
        """Sample indices in row order."""
        return tuple(chain.from_iterable(self.groups))


NO_SAMPLES = MicroBatch((), 0)
"""What a rank computes that has fewer micro-batches than others, where all have to take part in each."""


class GroupTokens(NamedTuple):
    """Tokens of a prompt, the root among them, and of each of its samples."""

    prompt: int
    responses: tuple[int, ...]

    @property
    def total(self) -> int:
        """All of them, the prompt's once."""
        return self.prompt + sum(self.responses)

    @property
    def longest(self) -> int:
        """Those of the longest sample with its prompt."""
        return self.prompt + max(self.responses)


LEAST_ROOT = 32
"""Tokens: a shorter root saves little, and stays in the prompts."""


def root_of(prompts: Collection[tuple[int, ...]]) -> int:
    """Tokens that all of several prompts begin with, each of which has one more; 0 where they are below LEAST_ROOT."""
    root = common_length([token_ids[:-1] for token_ids in prompts]) if len(prompts) > 1 else 0
    return root if root >= LEAST_ROOT else 0


def common_length(texts: Collection[tuple[int, ...]] | Collection[bytes]) -> int:
    """How many tokens all of them begin with: those that the first and the last in order have in common."""
    first, last = min(texts), max(texts)
    shorter = min(len(first), len(last))
    return next((place for place in range(shorter) if first[place] != last[place]), shorter)


def draw_mini_batches(
    ids: Sequence[tuple[int, int]], count: int, *, seed: int, step: int, epoch: int, whole_groups: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Split samples into `count` mini-batches of sizes as equal as they can be (they need not divide).

    Whole groups are drawn while there are at least as many groups as mini-batches: a group's prompt is then computed
    once per epoch, and its advantages, which add up to about zero, stay in one gradient. With fewer groups than
    mini-batches single samples are drawn. The draw orders ids by a keyed hash, so it depends on the ids and on
    (seed, step, epoch) alone: not on the order of `ids`, not on a random-number state.

    Args:
        ids: (prompt uid, sample index) of each sample, all different.
        count: mini-batches wanted, at least 1.
        whole_groups: never split the samples of one prompt, such as a pair of a chosen and a rejected completion.

    Returns:
        Positions in `ids`, ascending within each mini-batch. Fewer than `count` mini-batches only where there are
        fewer samples (with `whole_groups`: fewer groups) than that; none is empty.
    """
    assert count >= 1, f"count must be at least 1, found {count}"
    assert len(set(ids)) == len(ids), "two samples have the same (prompt uid, sample index)"
    if not ids:
        return ()
    if count == 1:
        return (tuple(range(len(ids))),)
    groups: dict[int, list[int]] = {}
    for position, (uid, _) in enumerate(ids):
        groups.setdefault(uid, []).append(position)
    if whole_groups or len(groups) >= count:
        units = [((uid,), members) for uid, members in groups.items()]
    else:
        units = [(sample_id, [position]) for position, sample_id in enumerate(ids)]
    units.sort(key=lambda unit: (_hash(seed, step, epoch, *unit[0]), unit[0]))
    count = min(count, len(units))
    cuts = [len(units) * i // count for i in range(count + 1)]
    return tuple(
        tuple(sorted(chain.from_iterable(members for _, members in units[start:stop])))
        for start, stop in pairwise(cuts)
    )


def split_micro_batches(
    samples: Sequence[SampleSize], budget_tokens: int, *, whole_groups: bool = False
) -> tuple[MicroBatch, ...]:
    """Split samples into micro-batches of at most `budget_tokens` packed tokens, the root of each among them.

    A group that fits the budget stays whole, so that its prompt is computed once. A larger one is cut into pieces that
    each pay the prompt again, few of them (first fit, longest response first). A sample that alone exceeds the budget
    gets a micro-batch of its own. Pieces are then placed first fit, largest first: the widest forward comes first,
    and memory that does not suffice is found out at once.

    Args:
        whole_groups: never split a group, such as a pair of a chosen and a rejected completion; one that exceeds the
            budget gets a micro-batch of its own.

    Returns:
        Every sample in exactly one micro-batch. A pure function of its arguments.
    """
    assert budget_tokens >= 1, f"budget_tokens must be at least 1, found {budget_tokens}"
    root = samples[0].root_tokens if samples else 0
    room = budget_tokens - root
    groups: dict[Hashable, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(i)
    pieces: list[tuple[int, tuple[int, ...]]] = []
    for members in groups.values():
        prompt_tokens = samples[members[0]].prompt_tokens
        assert all(samples[i].prompt_tokens == prompt_tokens for i in members), "one group, two prompt lengths"
        lengths = [samples[i].response_tokens for i in members]
        cut = [list(range(len(members)))] if whole_groups else _first_fit(lengths, room - prompt_tokens)
        for piece in cut:
            tokens = prompt_tokens + sum(lengths[k] for k in piece)
            pieces.append((tokens, tuple(members[k] for k in piece)))
    sizes = [tokens for tokens, _ in pieces]
    return tuple(
        MicroBatch.of(tuple(pieces[k][1] for k in chosen), root + sum(sizes[k] for k in chosen), root)
        for chosen in _first_fit(sizes, room)
    )


def _first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing. Bins in order of their largest item, items ascending within a bin; an item larger than
    `capacity` has a bin to itself."""
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    num_large = sum(size > capacity for size in sizes)
    bins = [[item] for item in order[:num_large]]
    bins += _first_fit_of(order[num_large:], sizes, capacity)
    return [sorted(members) for members in bins]


def _first_fit_of(items: Sequence[int], sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Each item in the first bin that has room for it; every one fits an empty bin.

    A binary tree stands over the bins, so that the first of many is found in few steps: `room[n]` is the most that any
    bin below node n has free. Node n has the children 2n and 2n + 1; the bins are the lowest nodes, from left to right.
    """
    lowest = 1 << (len(items) - 1).bit_length() if items else 0
    room = [capacity] * (2 * lowest)
    bins: list[list[int]] = []
    for item in items:
        size, node = sizes[item], 1
        while node < lowest:
            node *= 2
            if room[node] < size:
                node += 1
        if node - lowest == len(bins):
            bins.append([])
        bins[node - lowest].append(item)
        room[node] -= size
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def _hash(*numbers: int) -> bytes:
    """A 64-bit hash of integers, the same on every machine and in every version of the libraries."""
    return blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
