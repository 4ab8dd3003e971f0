"""What guessed tokens come to in a step of decoding, as runs have measured it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Drafts:
    """In the mean over steps of decoding, those without guesses included.

    tokens: that a sample gets in a step; rows: that are computed for it
    """

    tokens: float = 1.0
    rows: float = 1.0


NO_DRAFTS = Drafts()
