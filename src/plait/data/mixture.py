"""Several sources in one run: which of them each prompt (example, pair) comes from. Torch-free.

Instance i of a run belongs to one source, and is its n-th: a function of the seed and i alone, so there is nothing to
save and restore. Sources take turns as evenly as their weights allow; each goes through its own rows, epoch by epoch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

BLOCK = 1024
"""Instances between two places whose counts are kept."""


class RowSet(Protocol):
    """What a source has to ask or to learn."""

    @property
    def longest_tokens(self) -> int: ...

    @property
    def num_dropped(self) -> int: ...

    def __len__(self) -> int: ...


Set = TypeVar("Set", bound=RowSet)
Item = TypeVar("Item")


@dataclass(frozen=True)
class Mixed(Generic[Set]):
    """The sets of all sources of a run; usually there is one."""

    sets: tuple[Set, ...]
    names: tuple[str, ...] = ("",)
    """Names of the sources, unique; of one alone empty."""
    weights: tuple[float, ...] = (1.0,)
    """Shares of what is drawn, in any unit."""
    shuffles: tuple[bool, ...] = (True,)
    """Whether each has a new order in every epoch."""

    def __len__(self) -> int:
        """Rows of all sources: so many instances are an epoch of the run."""
        return sum(map(len, self.sets))

    @property
    def longest_tokens(self) -> int:
        return max(rows.longest_tokens for rows in self.sets)

    @property
    def num_dropped(self) -> int:
        return sum(rows.num_dropped for rows in self.sets)


class Turns:
    """Whose turn it is at each instance.

    The n-th of source s comes at time (n + u_s) / weight_s, with an offset u_s in [0, 1) drawn by the seed; the
    instances are these in the order of time. So of the first i instances no source has further than the number of
    sources from its share of i; and where the weights are the numbers of rows, an epoch of the run (as many instances
    as there are rows) is one epoch of each source.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        assert weights, "there is at least one source"
        assert all(weight > 0 for weight in weights), f"weights are above 0, got {weights}"
        draws = random.Random(f"plait.data/mixture/{seed}")
        self._weights = tuple(weights)
        self._offsets = tuple(draws.random() for _ in weights)
        self._kept: list[list[int]] = [[0] * len(self._weights)]
        """Counts of each source before instance 0, BLOCK, 2 · BLOCK, …"""

    def counts(self, instance: int) -> list[int]:
        """How many of the instances before this one each source has."""
        if len(self._weights) == 1:
            return [instance]
        block, rest = divmod(instance, BLOCK)
        while len(self._kept) <= block:
            self._kept.append(self._after(self._kept[-1], BLOCK))
        return self._after(self._kept[block], rest)

    def turn(self, counts: Sequence[int]) -> int:
        """The source whose turn it is after so many of each; of a tie the first."""
        times = [(n + u) / w for n, u, w in zip(counts, self._offsets, self._weights, strict=True)]
        return times.index(min(times))

    def take(self, start: int, count: int) -> list[tuple[int, int]]:
        """For instances `start` … `start + count − 1` the source, and which of its instances it is."""
        counts, places = list(self.counts(start)), []
        for _ in range(count):
            source = self.turn(counts)
            places.append((source, counts[source]))
            counts[source] += 1
        return places

    def _after(self, counts: Sequence[int], count: int) -> list[int]:
        after = list(counts)
        for _ in range(count):
            after[self.turn(after)] += 1
        return after


class InstanceOrder:
    """Which row instance i of a run takes: place i mod n of epoch i div n, each epoch a permutation of its own."""

    def __init__(self, length: int, *, seed: int | str, shuffle: bool) -> None:
        self._length = length
        self._shuffle = shuffle
        self._order = lru_cache(maxsize=2)(lambda epoch: _permutation(seed, epoch, length))

    def row(self, instance: int) -> int:
        epoch, place = divmod(instance, self._length)
        return self._order(epoch)[place] if self._shuffle else place


class Stream(Generic[Set, Item]):
    """The instances of a run, by their numbers: a function of sets, seed and number, so there is nothing to save.

    Instance i takes place i mod n of epoch i div n; each epoch is a permutation of its own of the n rows. Of several
    sources each has instances and epochs of its own (`Turns`). Who takes so many for each step goes on from one epoch
    to the next within a batch. Numbers are the uids of prompts, so two instances of one row differ.

    Args:
        instance: (set of a source, row of it, uid) → what it is asked by, or what is learnt of it.
    """

    def __init__(self, mixed: Mixed[Set], instance: Callable[[Set, int, int], Sequence[Item]], *, seed: int) -> None:
        self.mixed = mixed
        self._instance = instance
        self._turns = Turns(mixed.weights, seed)
        self._orders = [
            InstanceOrder(len(rows), seed=f"{seed}/{place}" if place else seed, shuffle=shuffle)
            for place, (rows, shuffle) in enumerate(zip(mixed.sets, mixed.shuffles, strict=True))
        ]

    def take(self, start: int, count: int) -> list[Item]:
        """Instances `start` … `start + count − 1`, in order."""
        taken: list[Item] = []
        for uid, (source, n) in enumerate(self._turns.take(start, count), start):
            taken += self._instance(self.mixed.sets[source], self._orders[source].row(n), uid)
        return taken

    def epoch(self, count: int) -> float:
        """Passes over all rows in the first `count` instances, a fraction included."""
        return count / len(self.mixed)

    def passes(self, count: int) -> dict[str, float]:
        """Name of each source → passes over its rows in the first `count` instances; empty where there is but one."""
        if len(self.mixed.sets) == 1:
            return {}
        of_sources = zip(self.mixed.names, self._turns.counts(count), self.mixed.sets, strict=True)
        return {name: n / len(rows) for name, n, rows in of_sources}


def _permutation(seed: int | str, epoch: int, length: int) -> tuple[int, ...]:
    order = list(range(length))
    random.Random(f"plait.data/{seed}/{epoch}").shuffle(order)
    return tuple(order)
