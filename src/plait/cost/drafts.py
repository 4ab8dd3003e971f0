"""What draft tokens come to in a step of decoding, as runs have measured it or as recipes fix it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

TRUST = 0.8
"""Chance that a token of a draft model is taken to be accepted, if all before it are, where no run has measured it; as
long as nothing is known, `speculation` takes the same."""


@dataclass(frozen=True)
class Drafts:
    """In the mean over steps of decoding, those without drafts included.

    tokens: that a sample gets in a step; rows: that are computed for it
    passes: forwards of a draft model, each of a token for every sample
    """

    tokens: float = 1.0
    rows: float = 1.0
    passes: float = 0.0

    @classmethod
    def fixed(cls, length: int) -> Self:
        """What a draft model brings that drafts so many tokens in every step."""
        tokens = sum(TRUST**place for place in range(length + 1))
        return cls(tokens, 1.0 + length, float(length))


NO_DRAFTS = Drafts()
