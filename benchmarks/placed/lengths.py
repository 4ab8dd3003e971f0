"""Response lengths that a benchmark gives: log-normal, those of one prompt alike, cut at a limit."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class LogNormal:
    """median: of all lengths, before they are cut at `limit`; between, within: sigma of the logarithms of prompts'
    medians, and of a prompt's samples around theirs; odd: medians of every second prompt are so many times as long"""

    median: float
    between: float
    within: float
    limit: int
    seed: int = 0
    odd: float = 1.0

    def of(self, prompt: int, count: int) -> tuple[int, ...]:
        """Of the samples of a prompt, the same whenever it is asked."""
        draw = random.Random(f"{self.seed}/{prompt}")
        middle = self.median * draw.lognormvariate(0.0, self.between) * (self.odd if prompt % 2 else 1.0)
        return tuple(
            max(1, min(self.limit, round(middle * draw.lognormvariate(0.0, self.within)))) for _ in range(count)
        )
