"""Which steps are computed with more rows than seem to pay, to learn what they take.

What one row more takes is not what each takes where kernels take rows by fours, and what many may take is not covered
by the margin (`margin`) before some fewer were measured: so there are several counts, the fewest first.

Shapes: M rows more.
"""

from __future__ import annotations

from math import ceil

import numpy as np
from numpy.typing import NDArray

PROBED = (1.25, 1.5, 2.0)
"""Rows of such steps, in rows without drafts."""
PROBES = 2
"""Trials of each, for every power of two of running samples."""
MOST_LOOKS = 32
"""Looks for such trials, of every power of two: where most are not covered, no more are looked for."""


class Probes:
    """What was tried."""

    def __init__(self) -> None:
        self.trials: dict[tuple[int, int], int] = {}
        """By the bits of the number of running samples, and the place in PROBED."""
        self._looks: dict[int, int] = {}
        """Those that were meant for a trial, by the bits of the number of running samples."""

    def is_known(self, num_samples: int) -> bool:
        """Whether steps of so many samples were computed with half as many rows more or, where that is covered, with
        twice as many: where rows are dear the most never is."""
        return any(self._num(num_samples, number) >= PROBES for number in (len(PROBED) - 2, len(PROBED) - 1))

    def is_wanted(self, num_samples: int) -> bool:
        """Whether to look for drafts to compute in a further trial. Each call is such a look."""
        bits = num_samples.bit_length()
        looks = self._looks[bits] = self._looks.get(bits, 0) + 1
        return looks <= MOST_LOOKS and not self.is_known(num_samples)

    def fewest(self, num_samples: int) -> int:
        """Rows more of the smallest trial that was not made often enough; 1: of none."""
        rows = (ceil(num_samples * factor) - num_samples for factor in PROBED)
        return next((more for number, more in enumerate(rows) if self._num(num_samples, number) < PROBES), 1)

    def more(self, num_samples: int, allowed_M1: NDArray[np.bool_]) -> int:
        """Rows more that the next step is to have; 0: what they take is known, or is not covered, or there is nothing
        to compute in them.

        Args:
            allowed_M1: whether the margin covers 0 … M of them.
        """
        rows = [ceil(num_samples * factor) for factor in PROBED]
        for number, num_rows in enumerate(rows):
            more, trials = num_rows - num_samples, self._num(num_samples, number)
            is_another = num_rows not in rows[number + 1 :]
            if is_another and trials < PROBES and more < len(allowed_M1) and allowed_M1[more]:
                self.trials[num_samples.bit_length(), number] = trials + 1
                return more
        return 0

    def _num(self, num_samples: int, number: int) -> int:
        return self.trials.get((num_samples.bit_length(), number), 0)
