"""Which samples of two calls belong together: those of one prompt, or samples and what was drawn from prompts that were
made of them (`records.MadeOf`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from plait.data.records import MadeOf, Sample

Key = tuple[int, ...]
"""Uid of a prompt of the data, then the index of each sample that leads from it to those that have the key."""


def made_of(sample: Sample, call: int) -> MadeOf:
    """What a prompt that is made of a sample keeps of it.

    Args:
        call: id of the node that drew the sample.
    """
    before = sample.prompt.made_of or MadeOf(sample.prompt.uid, ())
    return MadeOf(before.uid, (*before.samples, (call, sample.index)))


@dataclass(frozen=True)
class Meeting:
    """How samples of two calls find each other.

    depth: how many samples lead to those of both: 0 where they have the prompt alone in common
    """

    depth: int

    @classmethod
    def of(cls, samples: Sequence[Sample], call: int, others: Sequence[Sample], other_call: int) -> Meeting:
        """
        Args:
            call, other_call: ids of the nodes that drew them.
        """
        if not samples or not others:
            return cls(0)
        steps = zip(_calls(samples[0], call), _calls(others[0], other_call), strict=False)
        return cls(len(list(takewhile(lambda pair: pair[0] == pair[1], steps))))

    def key(self, sample: Sample) -> Key:
        """Equal for samples that belong together."""
        made = made_of(sample, 0)
        return (made.uid, *(index for _, index in made.samples[: self.depth]))

    def places(self, samples: Sequence[Sample]) -> Mapping[Key, tuple[int, ...]]:
        """Key → positions of the samples that have it, by prompt and index."""
        places: dict[Key, list[int]] = {}
        for position in sorted(range(len(samples)), key=lambda i: (samples[i].prompt.uid, samples[i].index)):
            places.setdefault(self.key(samples[position]), []).append(position)
        return {key: tuple(positions) for key, positions in places.items()}


def _calls(sample: Sample, call: int) -> tuple[int, ...]:
    """Ids of the nodes that drew the samples which lead to a sample, and that drew it."""
    return tuple(number for number, _ in made_of(sample, call).samples)
