"""The sequences that a scheduler knows: those that run, those that wait, and in which order they came.

Words as in `policy.batching`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge

from plait.policy.step import Key

Order = tuple[int, int, int]
"""In which samples come: those of an earlier rollout, then in which they were asked for, by the prompt's number and the
sample's index. Who is younger gives way."""

OLDEST: Order = (-1, -1, -1)
"""Before all."""


@dataclass(slots=True)
class Started:
    """A sample that has started."""

    key: Key
    order: Order
    num_tokens: int
    """Tokens of prompt and response; all but the newest are computed when it runs."""
    num_computed_tokens: int
    """Whose keys and values lie in the pool."""
    table: list[int]
    names: tuple[Hashable, ...]
    """Prefix keys of the full blocks of its prompt."""
    is_current: bool = True
    """What it holds was computed with the present weights, so others may share it."""
    turn: int = 0
    """The number of the last step that computed it; 0: none here."""
    num_parked_tokens: int = 0
    """Whose keys and values lie beside the pool, and come into it when the sample runs."""


@dataclass(slots=True)
class Prompt:
    """A prompt with samples that have not started."""

    uid: int
    number: int
    """In order of arrival."""
    num_tokens: int
    pending: list[int]
    names: tuple[Hashable, ...]
    num_computed_tokens: int = 0
    table: list[int] = field(default_factory=list)
    is_current: bool = True
    rollout: int = 0

    @property
    def order(self) -> Order:
        return self.rollout, self.number, self.pending[0]


class Sequences:
    """Samples that run, samples that are to be computed again or on their way, prompts with samples to start."""

    def __init__(self) -> None:
        self.running: dict[Key, Started] = {}
        self.preempted: list[Started] = []
        """In their order: to be computed again, or on their way."""
        self.prompts: dict[int, Prompt] = {}
        self.num_unstarted = 0
        """Samples of prompts that have not started; counted, for prompts may be many."""
        self._count = 0

    def __iter__(self) -> Iterator[Started | Prompt]:
        """Whatever may hold blocks."""
        yield from (*self.running.values(), *self.preempted, *self.prompts.values())

    @property
    def num_waiting(self) -> int:
        """Samples that are not in the batch."""
        return len(self.preempted) + self.num_unstarted

    @property
    def waiting(self) -> Iterator[Key]:
        """Samples that are not in the batch."""
        yield from (sample.key for sample in self.preempted)
        yield from ((prompt.uid, index) for prompt in self.prompts.values() for index in prompt.pending)

    def in_turn(self) -> Iterator[Started | Prompt]:
        """What waits, the first to be computed first: of each rollout, what has started before."""
        return merge(self.preempted, self.prompts.values(), key=lambda item: item.order[0])

    def find(self, key: Key) -> Started | None:
        """The sample, if it has started."""
        return self.running.get(key) or next((s for s in self.preempted if s.key == key), None)

    def add_prompt(
        self, uid: int, num_tokens: int, indices: Sequence[int], names: tuple[Hashable, ...], rollout: int
    ) -> None:
        """Samples of a prompt wait behind all of their rollout and of earlier ones that are here."""
        assert uid not in self.prompts, f"prompt {uid} waits already"
        is_last = not self.prompts or next(reversed(self.prompts.values())).rollout <= rollout
        later = [] if is_last else [other.uid for other in self.prompts.values() if other.rollout > rollout]
        self.prompts[uid] = Prompt(uid, self._count, num_tokens, list(indices), names, rollout=rollout)
        for other in later:
            self.prompts[other] = self.prompts.pop(other)
        self.num_unstarted += len(indices)
        self._count += 1

    def add_started(self, key: Key, num_tokens: int, names: tuple[Hashable, ...], rollout: int) -> Started:
        """A sample that has started elsewhere waits, ahead of all of its rollout that have not started; nothing of it
        is computed."""
        sample = Started(key, (rollout, self._count, key[1]), num_tokens, 0, [], names)
        self._count += 1
        insort(self.preempted, sample, key=order_of)
        return sample

    def preempt(self, sample: Started) -> None:
        """It runs no longer, and waits."""
        del self.running[sample.key]
        insort(self.preempted, sample, key=order_of)

    def enter(self, sample: Started) -> None:
        """It waits no longer, and runs."""
        self.preempted.remove(sample)
        self.running[sample.key] = sample

    def pop(self, key: Key) -> Started | None:
        """Take a sample out that has started; None: there is none of this key."""
        sample = self.find(key)
        if sample is not None and self.running.pop(key, None) is None:
            self.preempted.remove(sample)
        return sample

    def youngest_waiting(self, order: Order) -> Started | Prompt | None:
        """What waits and holds blocks, the youngest, if it is younger than `order`."""
        holders = (item for item in (*reversed(self.prompts.values()), *reversed(self.preempted)) if item.table)
        return next((item for item in holders if item.order > order), None)


def order_of(sample: Started) -> Order:
    """The key to sort samples by."""
    return sample.order
