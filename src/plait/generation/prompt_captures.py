"""Which steps with prompts among their rows are captured to be replayed.

A prompt that is computed beside samples that decode, as soon as one of them has ended, is few rows: the host takes ten
times as long to launch its layers as the device to compute them. But prompts have many lengths, and a capture takes as
long as some launches of the step do. So a step is captured when as many of its size have come.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

from plait.generation.captured_step import Size
from plait.generation.settings import MOST_GRAPHS_OF_PROMPTS

BEFORE = 6
"""Steps of a size that are launched before one is captured: about what it takes to show and capture it."""


class PromptCaptures:
    """Says when. The same on ranks that compute the same steps.

    Args:
        drop: forgets the graph of a size.
    """

    def __init__(self, drop: Callable[[Size], object]) -> None:
        self._drop = drop
        self._met: Counter[Size] = Counter()
        self._due: OrderedDict[Size, None] = OrderedDict()
        """Sizes that are replayed, or are to be; the one that came last is the last."""
        self._is_refused = False

    def refuse(self) -> None:
        """One could not be captured, or said something else: none is replayed any more."""
        self._is_refused = True
        for size in self._due:
            self._drop(size)

    def comes(self, size: Size) -> bool:
        """Count a step of this size; whether it is to be replayed. Of more sizes than MOST_GRAPHS_OF_PROMPTS that which
        has not come for longest begins again."""
        if self._is_refused:
            return False
        if size not in self._due:
            self._met[size] += 1
            if self._met[size] <= BEFORE:
                return False
        self._due[size] = None
        self._due.move_to_end(size)
        if len(self._due) > MOST_GRAPHS_OF_PROMPTS:
            oldest, _ = self._due.popitem(last=False)
            del self._met[oldest]
            self._drop(oldest)
        return True
