"""Prompts that were computed on other instances than samples are drawn on: how many of them go on to an instance now.

What goes there takes its room and waits for its turn. So it gets as many as its batch and its pool have room for, and
one behind a full batch, which begins when places get free. Decisions over numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from plait.policy.blocks import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class PromptRoom:
    """What an instance that draws has room for.

    slots:     samples that it runs at once
    kv_tokens: of its pool
    most:      tokens that come at once at most, if that is more than one prompt: memory beside the pools
    """

    slots: int
    kv_tokens: float = inf
    most: float = inf


@dataclass(frozen=True, slots=True)
class Taken:
    """num: samples; tokens: of their prompts and responses, those counted once that they share"""

    num: int = 0
    tokens: int = 0

    def __add__(self, other: Taken) -> Taken:
        return Taken(self.num + other.num, self.tokens + other.tokens)


def num_that_go(computed: Sequence[Taken], taken: Taken, room: PromptRoom) -> int:
    """How many of the computed prompts, first come, first served. To an instance that has nothing one goes in any case:
    it was checked to fit alone.

    Args:
        computed: each with the samples that it will have, of which nothing is said yet.
        taken: what the instance has now.
    """
    tokens = 0
    for number, prompt in enumerate(computed):
        tokens += prompt.tokens
        if number and tokens > room.most:
            return number
        growth = (taken.num + prompt.num) * BLOCK_TOKENS  # a block behind each that runs, as the engine leaves
        if taken.num and (taken.num > room.slots or taken.tokens + prompt.tokens + growth > room.kv_tokens):
            return number
        taken += prompt
    return len(computed)
