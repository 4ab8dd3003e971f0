"""How often draft tokens are accepted, learned from what samples said afterwards, whether the drafts were computed or
not.

What a sample says does not depend on drafts, so a draft that was looked up and left alone teaches as much as one
that was computed. A *trial* is a draft token of which all before were accepted; it was accepted or not. Trials are
counted by cells (`draft_lookup.CELLS`): greedy or not, source, length of the context, position in the draft,
confidence. Where a cell has few, those of wider classes speak for it, last the confidence itself; of a draft model,
which looks nothing up, TRUST.

Shapes: C cells, S sources.
"""

from __future__ import annotations

import numpy as np

from plait.kernels.draft_lookup import CELLS, MODEL, NUM_CONFIDENCES
from plait.speculation.pool import FloatArray, IntArray

Learned = tuple[FloatArray, FloatArray]
"""Trials and hits of all cells, flat."""

PRIOR = 8.0
"""Trials that a wider class counts as in a narrower one."""
TRUST = 0.8
"""Chance that a draft of a draft model is taken to be accepted before there are trials: it is tried, then."""
REFRESH = 256
"""Trials after which the table is made anew."""
FORGET = 0.5
"""What counts are multiplied by when the policy changes."""
_DEPTH_AXIS, _MATCH_AXIS, _SOURCE_AXIS = 3, 2, 1


class Acceptance:
    """Counts of trials, and the table made of them."""

    def __init__(self) -> None:
        self.trials_C, self.hits_C = np.zeros(CELLS), np.zeros(CELLS)
        self.table_C = self._table()
        """Chance that a draft token of each cell is accepted, if all before it are, flat."""
        self._fresh, self._num_trials = 0, 0.0

    def learn(self, cells: IntArray, hits: IntArray) -> None:
        """Trials of these cells, and which of them were accepted."""
        trials_C, hits_C = self.trials_C.reshape(-1), self.hits_C.reshape(-1)
        for cell, hit in zip(cells.tolist(), hits.tolist(), strict=True):  # of so few, arrays would take longer
            trials_C[cell] += 1.0
            hits_C[cell] += hit
        self._fresh += len(cells)
        self._num_trials += len(cells)
        if self._fresh >= REFRESH or self._fresh * 8 >= self._num_trials:
            self.settle()

    @property
    def learned(self) -> Learned:
        """What it knows, for another that learns of the same policy."""
        return self.trials_C.reshape(-1).copy(), self.hits_C.reshape(-1).copy()

    def take(self, learned: Learned) -> None:
        """Know what another knows, of each cell of which that has seen more: told twice, nothing counts twice."""
        trials_C, hits_C = (counts.reshape(CELLS) for counts in learned)
        more_C = trials_C > self.trials_C
        self.trials_C = np.where(more_C, trials_C, self.trials_C)
        self.hits_C = np.where(more_C, hits_C, self.hits_C)
        self._num_trials = float(self.trials_C.sum())
        self.settle()

    def forget(self) -> None:
        """The policy has changed: what was learned counts less."""
        self.trials_C *= FORGET
        self.hits_C *= FORGET
        self._num_trials *= FORGET

    def settle(self) -> None:
        """Let the table follow from all that was learned, and forgotten."""
        self.table_C, self._fresh = self._table(), 0

    def _table(self) -> FloatArray:
        """Widest classes first, each the prior of the next."""
        confidences = (np.arange(NUM_CONFIDENCES) + 0.5) / NUM_CONFIDENCES
        over = (_SOURCE_AXIS, _MATCH_AXIS, _DEPTH_AXIS)
        looked_up = _posterior(self.trials_C[:, :MODEL], self.hits_C[:, :MODEL], over, 0.5 * confidences)
        shape = (CELLS[0], 1, 1, 1, NUM_CONFIDENCES)
        trusted = np.full(shape, TRUST)
        table = np.concatenate([*[np.broadcast_to(looked_up, shape)] * MODEL, trusted], axis=_SOURCE_AXIS)
        for over in ((_MATCH_AXIS, _DEPTH_AXIS), (_DEPTH_AXIS,), ()):
            table = _posterior(self.trials_C, self.hits_C, over, table)
        return np.ascontiguousarray(table).reshape(-1)


def _posterior(trials_C: FloatArray, hits_C: FloatArray, over: tuple[int, ...], prior: FloatArray) -> FloatArray:
    """Shares of hits in classes that are the sums of cells over these axes, which stay with length 1."""
    trials, hits = trials_C.sum(over, keepdims=True), hits_C.sum(over, keepdims=True)
    return (hits + PRIOR * prior) / (trials + PRIOR)
