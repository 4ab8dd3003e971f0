"""What simulated engines that draft have in common."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plait.speculation.pool import FloatArray, IntArray

WINDOW = 32


def slowest_window(steps: Sequence[tuple[float, float]]) -> float:
    """Times as fast as plain decoding in the slowest 32 consecutive steps.

    Args:
        steps: seconds of plain decoding for what each step gave, and its own.
    """
    sums = np.concatenate([np.zeros((1, 2)), np.cumsum(steps, 0)])
    plain, taken = (sums[WINDOW:] - sums[:-WINDOW]).T
    return float((plain / taken).min())


class Forgetful:
    """The half of a Drafter that is told things, of one that has no use for them."""

    num_bytes = 0

    def begin(self, slot: int, prompt_ids: tuple[int, ...]) -> None: ...
    def say(self, slots_B: IntArray, counts_B: IntArray, token_ids_T: IntArray, probs_T: FloatArray) -> None: ...
    def record(self, prompt_ids: tuple[int, ...], token_ids: IntArray, probs: FloatArray) -> None: ...
    def end(self, slot: int) -> None: ...
    def grow_old(self) -> None: ...
