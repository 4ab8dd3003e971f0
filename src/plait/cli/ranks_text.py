"""Ranks in few words, as tables name them."""

from __future__ import annotations

from collections.abc import Sequence

MOST_RANKS_NAMED = 4
"""At most so many are named where they do not follow each other."""


def ranks_text(ranks: Sequence[int]) -> str:
    """`0-3`; `0,2,1` where they do not follow each other."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


def few_ranks_text(ranks: Sequence[int]) -> str:
    """`ranks_text`; of many that do not follow each other the first."""
    text = ranks_text(ranks)
    if len(ranks) <= MOST_RANKS_NAMED or "-" in text:
        return text
    return f"{','.join(map(str, ranks[:MOST_RANKS_NAMED]))}…"
