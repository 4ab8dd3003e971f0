"""Drafts of samples, kept until what the samples say is held against them.

Shapes: B samples, K tokens of a draft, S slots, T tokens said, X trials: draft tokens of which all before were
    accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.kernels import draft_lookup
from plait.speculation.drafter import DraftTokens
from plait.speculation.pool import IntArray


@dataclass(frozen=True)
class Trials:
    """What came of draft tokens."""

    cells_X: IntArray
    """What the acceptance of each is learned by (`acceptance.Acceptance`)."""
    hits_X: IntArray
    """1 where it was accepted."""
    places_X: IntArray
    """Its position in the draft; -1 where it was only looked up, and not computed."""
    num_computed: int
    """How many of them were computed."""

    def __len__(self) -> int:
        return len(self.cells_X)


class KeptDrafts:
    """The draft of each slot that is being followed.

    Args:
        most: tokens of a draft.
    """

    def __init__(self, most: int) -> None:
        by_token = np.zeros((0, most), np.int32), np.zeros((0, most), np.int64)
        self._arrays: tuple[NDArray[Any], ...] = (*by_token, *(np.zeros(0, np.int64) for _ in range(3)))
        """drafts [S, K] and their cells [S, K]; of each draft its length [S], how many of its tokens are computed [S]
        and how many were accepted [S]."""

    def clear(self, slot: int) -> None:
        """No draft is followed in a slot, which may be one beyond those so far."""
        while slot >= len(self._lengths_S):
            more = max(16, len(self._lengths_S))
            self._arrays = tuple(
                np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)]) for array in self._arrays
            )
        self._lengths_S[slot] = 0

    def hear(self, slots_B: IntArray, counts_B: IntArray, token_ids_T: IntArray) -> Trials:
        """Hold what samples have said against their drafts.

        Args:
            counts_B: tokens of each sample, in `token_ids_T`.
        """
        cells_X, places_X, hits_X = np.empty((3, len(token_ids_T)), np.int64)
        count, num_computed = draft_lookup.verify_drafts(
            slots_B, counts_B, token_ids_T, *self._arrays, cells_X, places_X, hits_X
        )
        return Trials(cells_X[:count], hits_X[:count], places_X[:count], num_computed)

    def keep(self, slots_B: IntArray, drafts: DraftTokens, computed_B: IntArray) -> None:
        """Follow these drafts. One that was only looked up is followed to its end, before another one takes its place.

        Args:
            computed_B: how many tokens of each draft are computed in this step.
        """
        draft_lookup.remember(
            slots_B, drafts.token_ids_BK, drafts.cells_BK, drafts.lengths_B, computed_B, *self._arrays
        )

    def not_computed(self, slots_B: IntArray) -> None:
        """The drafts of these slots are not computed: they count as only looked up."""
        self._arrays[3][slots_B] = 0

    @property
    def _lengths_S(self) -> IntArray:
        return self._arrays[2]
