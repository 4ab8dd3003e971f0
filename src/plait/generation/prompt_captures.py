"""Which steps with prompts among their rows are captured to be replayed.

A prompt that is computed beside samples that decode, as soon as one of them has ended, is few rows: the host takes ten
times as long to launch its layers as the device to compute them. But prompts have many lengths, and a capture takes as
long as some launches of the step do. So a step is captured when as many of its size have come.
"""

from __future__ import annotations

from collections import Counter

from plait.generation.captured_step import Size
from plait.generation.settings import MOST_GRAPHS_OF_PROMPTS

BEFORE = 6
"""Steps of a size that are launched before one is captured: about what it takes to show and capture it."""


class PromptCaptures:
    """Says when, of the sizes that it is told. The same on ranks that compute the same steps."""

    def __init__(self) -> None:
        self._met: Counter[Size] = Counter()
        self._due: set[Size] = set()
        self.is_refused = False
        """Whether one could not be captured, or said something else: then none is."""

    def is_due(self, size: Size) -> bool:
        """Whether a step of this size, which comes now, is to be replayed from now on."""
        if self.is_refused:
            return False
        self._met[size] += 1
        if self._met[size] > BEFORE and len(self._due) < MOST_GRAPHS_OF_PROMPTS:
            self._due.add(size)
        return size in self._due
