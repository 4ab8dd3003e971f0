"""Unfinished samples of a role that go on in other instances, as the leader says it, and who does it on a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from plait.policy.step import Key


@dataclass(frozen=True)
class Gathering:
    """Samples that leave some instances for others.

    pairs:   (source, target), numbers of instances → the samples that move
    numbers: prompt → the command that asked for its samples, which they are delivered under
    """

    pairs: Mapping[tuple[int, int], Sequence[Key]]
    numbers: Mapping[int, int]

    @property
    def instances(self) -> frozenset[int]:
        """All that have a part in it."""
        return frozenset(place for pair in self.pairs for place in pair)

    @property
    def sources(self) -> frozenset[int]:
        return frozenset(source for source, _ in self.pairs)

    def to_header(self) -> dict[str, Any]:
        """As JSON values."""
        pairs = [[*pair, [list(key) for key in keys]] for pair, keys in sorted(self.pairs.items())]
        return {"pairs": pairs, "numbers": [list(item) for item in self.numbers.items()]}

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> Gathering:
        pairs = {(source, target): [(uid, index) for uid, index in keys] for source, target, keys in header["pairs"]}
        return cls(pairs, dict(header["numbers"]))


class GathersSamples(Protocol):
    """Does a rank's part of gatherings (`migrations.SampleMoverOfRank`)."""

    place: int
    """The number of the rank's instance."""

    def gather(self, gathering: Gathering) -> list[Key]:
        """Do it; the samples that the rank's instance has given away."""
        ...
