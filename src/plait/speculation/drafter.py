"""Where guesses come from: what every source of them does, and the one that looks known texts up.

Shapes: B samples asked for, K tokens of a guess, C cells of acceptance, T tokens said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from plait.kernels import draft_lookup
from plait.speculation.pool import FloatArray, IntArray, TextPool


@dataclass(frozen=True)
class Asked:
    """Samples whose next tokens are to be guessed."""

    slots_B: IntArray
    keys_B: NDArray[np.uint64]
    """Noise keys of the samples (`noise.NoiseKey.sample_key`)."""
    places_B: IntArray
    """In the response, of the next token."""
    greedy_B: NDArray[np.bool_]
    limits_B: IntArray
    """Tokens of a guess at most."""


@dataclass(frozen=True)
class Guesses:
    """A chain of tokens for each sample that was asked for."""

    token_ids_BK: NDArray[np.int32]
    lengths_B: IntArray
    cells_BK: IntArray
    """What the acceptance of each token is learned by (`acceptance.Acceptance`)."""
    survival_BK: FloatArray
    """Chance that it and all before it come true; falls along a chain. 0 behind its end."""

    @property
    def num_tokens(self) -> int:
        return int(self.lengths_B.sum())


class Drafter(Protocol):
    """A source of guesses. It knows samples by slots, which are given again when a sample has ended.

    What it guesses changes no token of any sample, so it may forget what it likes.
    """

    def begin(self, slot: int, prompt_ids: tuple[int, ...]) -> None:
        """A sample of a prompt begins in a slot: nothing is said yet."""
        ...

    def say(self, slots_B: IntArray, counts_B: IntArray, token_ids_T: IntArray, probs_T: FloatArray) -> None:
        """Further tokens of these samples, so many each, and the probabilities with which they were drawn."""
        ...

    def record(self, prompt_ids: tuple[int, ...], token_ids: IntArray, probs: FloatArray) -> None:
        """A sample of a prompt that was drawn earlier, whole."""
        ...

    def end(self, slot: int) -> None:
        """The sample in a slot says nothing more."""
        ...

    def grow_old(self) -> None:
        """What has been said so far is of an older policy than what comes."""
        ...

    def guess(self, asked: Asked, most: int, acceptance_C: FloatArray, least: float) -> Guesses:
        """Guess the next tokens of samples.

        Args:
            most: tokens of a guess.
            acceptance_C: of each cell, how likely a guessed token comes true if all before it have.
            least: a guess ends where its survival falls below.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Memory that it holds."""
        ...


class PoolDrafter(TextPool):
    """Guesses from the pool of known texts."""

    def guess(self, asked: Asked, most: int, acceptance_C: FloatArray, least: float) -> Guesses:
        """See Drafter.guess."""
        shape = len(asked.slots_B), most
        found = Guesses(
            np.zeros(shape, np.int32), np.zeros(shape[0], np.int64), np.zeros(shape, np.int64), np.zeros(shape)
        )
        draft_lookup.propose(
            asked.slots_B,
            asked.keys_B,
            asked.places_B,
            asked.greedy_B,
            asked.limits_B,
            least,
            acceptance_C,
            self.ends,
            self.owners,
            self.roots,
            self.texts.kinds_O,
            *self.texts.index,
            found.token_ids_BK,
            found.cells_BK,
            found.survival_BK,
            found.lengths_B,
        )
        return found
