"""Drafts that a draft model draws token by token: who goes on, and what the tokens come to once the host knows them.

A device that computes behind draws all tokens of all chains before the host reads the first: then only limits end a
chain, and it is cut where it was unlikely. Where tokens are known at once, a chain that is unlikely is not drawn on.

Shapes: R samples, K tokens of a draft, N of the samples, D tokens that are drawn, C cells of acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from plait.speculation.drafter import Asked, DraftTokens, drafted_cells
from plait.speculation.pool import FloatArray, IntArray


class Chains:
    """The drafts of one call, all of which begin at the same time.

    Args:
        asked: the samples.
        most: tokens of a draft.
        acceptance_C, least: see `Drafter.propose`.
    """

    def __init__(self, asked: Asked, most: int, acceptance_C: FloatArray, least: float) -> None:
        count = len(asked.slots_B)
        self.drafts = DraftTokens.none(count, most)
        """As far as tokens are known."""
        self._drawn_RK = np.zeros((count, most), np.int64)
        """All that is known, of what a draft was cut by as well."""
        self._num_drawn_R, self._num_known_R = np.zeros((2, count), np.int64)
        """Tokens that were drawn, and those of them that are known."""
        self._survival_R = np.ones(count)
        self._greedy_R, self._limits_R = asked.greedy_B, np.minimum(asked.limits_B, most)
        self._acceptance_C, self._least = acceptance_C, least

    def going(self) -> IntArray:
        """[N]: the samples of which a token is drawn next, as far as is known."""
        return ((self._num_drawn_R < self._limits_R) & (self._survival_R >= self._least)).nonzero()[0]

    def draw(self, rows_N: IntArray) -> None:
        """A token of each of these is drawn."""
        self._num_drawn_R[rows_N] += 1

    def know(self, rows: Sequence[IntArray], token_ids_D: IntArray, confidence_D: FloatArray) -> None:
        """The next tokens that some chains drew, and the probabilities of these tokens.

        Args:
            rows: of each step in which tokens were drawn, those that drew one.
        """
        stops = list(accumulate(map(len, rows)))
        for rows_N, stop in zip(rows, stops, strict=True):
            drawn = slice(stop - len(rows_N), stop)
            self._know(rows_N, token_ids_D[drawn], confidence_D[drawn])

    def _know(self, rows_N: IntArray, token_ids_N: IntArray, confidence_N: FloatArray) -> None:
        """What one step drew: all of these tokens stand at the same place."""
        depth = int(self._num_known_R[rows_N[0]])
        self._num_known_R[rows_N] += 1
        self._drawn_RK[rows_N, depth] = token_ids_N
        cells_N = drafted_cells(self._greedy_R[rows_N], depth, confidence_N)
        self._survival_R[rows_N] *= self._acceptance_C[cells_N]
        is_kept_N = self._survival_R[rows_N] >= self._least  # survival falls: what is cut stays cut
        kept, drafts = rows_N[is_kept_N], self.drafts
        drafts.token_ids_BK[kept, depth], drafts.cells_BK[kept, depth] = token_ids_N[is_kept_N], cells_N[is_kept_N]
        drafts.survival_BK[kept, depth], drafts.lengths_B[kept] = self._survival_R[kept], depth + 1

    def computed(self, row: int) -> list[int]:
        """Tokens of a chain that the model has keys and values of: all that a further one was drawn behind."""
        return self._drawn_RK[row, : max(0, self._num_drawn_R[row] - 1)].tolist()
