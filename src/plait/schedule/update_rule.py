"""What a recipe asks of samples that are running when new weights come (`partial_rollout`, `tokens_per_version`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HeldKV = Literal["recompute", "keep"]
"""What becomes of keys and values that older weights computed, of a sample that goes on with new ones."""


@dataclass(frozen=True)
class UpdateRule:
    """Whether such samples go on with the new weights, and with which keys and values.

    kv: None: they end with the weights that they began with, and the new ones wait
    tokens: that a sample of a later batch draws in a step, at most; None: as many as come until the step ends
    """

    kv: HeldKV | None = None
    tokens: int | None = None

    @classmethod
    def of(cls, stated: Literal["off"] | HeldKV, tokens: int = 0) -> UpdateRule:
        """By what a recipe's keys have."""
        return cls() if stated == "off" else cls(stated, tokens or None)

    @property
    def waits(self) -> bool:
        return self.kv is None

    @property
    def by_clock(self) -> bool:
        """Whether it depends on seconds how far samples are when new weights come."""
        return not self.waits and self.tokens is None

    @property
    def keeps(self) -> bool:
        """Whether keys and values stay as older weights computed them."""
        return self.kv == "keep"


WAITS = UpdateRule()
"""Samples end with the weights that they began with."""
