"""Drafters that are functions of what a sample has said, among them such as mean no good.

A draft is (what a sample has said, most tokens) → tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

import numpy as np

from plait.speculation.drafter import Asked, DraftTokens
from plait.speculation.pool import FloatArray, IntArray
from tests.models.tiny import VOCAB_SIZE
from tests.speculation.played import Forgetful

Draft = Callable[[list[int], int], list[int]]


class ScriptedDrafter(Forgetful):
    """A Drafter of a function, sure of its tokens."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._said: dict[int, list[int]] = {}

    def begin(self, slot: int, prompt_ids: tuple[int, ...]) -> None:
        self._said[slot] = []

    def say(self, slots_B: IntArray, counts_B: IntArray, token_ids_T: IntArray, probs_T: FloatArray) -> None:
        for slot, stop, count in zip(slots_B, counts_B.cumsum(), counts_B, strict=True):
            self._said[int(slot)] += token_ids_T[stop - count : stop].tolist()

    def propose(self, asked: Asked, most: int, acceptance_C: FloatArray, least: float) -> DraftTokens:
        found = DraftTokens.none(len(asked.slots_B), most)
        for row, slot in enumerate(asked.slots_B.tolist()):
            tokens = self._draft(self._said[slot], int(min(most, asked.limits_B[row])))
            found.lengths_B[row] = len(tokens)
            found.token_ids_BK[row, : len(tokens)] = tokens
            found.survival_BK[row, : len(tokens)] = 0.9 ** np.arange(1, len(tokens) + 1)
        return found


def at_random(said: list[int], most: int) -> list[int]:
    drawn = random.Random(hash(tuple(said)))
    return [drawn.randrange(VOCAB_SIZE) for _ in range(drawn.randint(0, most))]


def stop_tokens(said: list[int], most: int) -> list[int]:
    """As if every sample ended here, and went on."""
    return [2, 3, 0][: min(most, 3)] * 2 if most >= 6 else [2][:most]


def wrong_at_last(known: Collection[tuple[int, ...]]) -> Draft:
    """What samples are known to say, but for the last token of each draft."""

    def draft(said: list[int], most: int) -> list[int]:
        count = len(said)
        coming = next((list(one[count : count + most]) for one in known if list(one[:count]) == said), [])
        return [*coming[:-1], coming[-1] ^ 1] if coming else []

    return draft


def misleading(name: str, known: Collection[tuple[int, ...]]) -> Draft:
    """One of MISLEADING by its name.

    Args:
        known: what samples say.
    """
    return {"at random": at_random, "stop tokens": stop_tokens, "wrong at last": wrong_at_last(known)}[name]


MISLEADING = ("at random", "stop tokens", "wrong at last")
