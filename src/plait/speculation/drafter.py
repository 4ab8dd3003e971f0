"""Where drafts come from: what every source of them does, what one does whose drafts take seconds that count, and the
one that looks known texts up.

Shapes: B samples asked for, K tokens of a draft, C cells of acceptance, T tokens said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from plait.kernels import draft_lookup
from plait.kernels.draft_lookup import CELLS, DEPTHS, MODEL, NUM_CONFIDENCES
from plait.speculation.pool import FloatArray, IntArray, TextPool


class SampledBy(Protocol):
    """How a sample draws; see `generation.sampling.Sampling`."""

    @property
    def temperature(self) -> float: ...

    @property
    def divisor(self) -> float: ...

    @property
    def top_k(self) -> int: ...

    @property
    def top_p(self) -> float: ...

    @property
    def min_p(self) -> float: ...

    @property
    def keeps(self) -> bool: ...


@dataclass(frozen=True)
class Asked:
    """Samples whose next tokens are to be drafted."""

    slots_B: IntArray
    keys_B: NDArray[np.uint64]
    """Noise keys of the samples (`noise.NoiseKey.sample_key`)."""
    places_B: IntArray
    """In the response, of the next token."""
    greedy_B: NDArray[np.bool_]
    limits_B: IntArray
    """Tokens of a draft at most."""
    samplings: Sequence[SampledBy]
    """[B]: how they draw, for who draws in their place; where nobody does, it may be empty."""

    def part(self, rows_R: IntArray) -> Self:
        """Some of the samples."""
        arrays = (self.slots_B, self.keys_B, self.places_B, self.greedy_B, self.limits_B)
        samplings = [self.samplings[row] for row in rows_R.tolist()] if self.samplings else ()
        return type(self)(*(array[rows_R] for array in arrays), samplings)


@dataclass(frozen=True)
class DraftTokens:
    """A chain of tokens for each sample that was asked for."""

    token_ids_BK: NDArray[np.int32]
    lengths_B: IntArray
    cells_BK: IntArray
    """What the acceptance of each token is learned by (`acceptance.Acceptance`)."""
    survival_BK: FloatArray
    """Chance that it and all before it are accepted; falls along a chain. 0 behind its end."""

    @classmethod
    def none(cls, num_samples: int, most: int) -> Self:
        """For so many samples no draft, with room for one of so many tokens."""
        shape = num_samples, most
        return cls(np.zeros(shape, np.int32), np.zeros(shape[0], np.int64), np.zeros(shape, np.int64), np.zeros(shape))

    @property
    def num_tokens(self) -> int:
        return int(self.lengths_B.sum())

    def among(self, rows_R: IntArray, num_samples: int) -> Self:
        """As drafts for so many samples, of which these R are those that it has drafts for."""
        spread = type(self).none(num_samples, self.token_ids_BK.shape[1])
        for name, array in vars(spread).items():
            array[rows_R] = getattr(self, name)
        return spread


class Drafter(Protocol):
    """A source of drafts. It knows samples by slots, which are given again when a sample has ended.

    What it drafts changes no token of any sample, so it may forget what it likes.
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

    def propose(self, asked: Asked, most: int, acceptance_C: FloatArray, least: float) -> DraftTokens:
        """Propose the next tokens of samples.

        Args:
            most: tokens of a draft.
            acceptance_C: of each cell, how likely a draft token is accepted if all before it are.
            least: a draft ends where its survival falls below.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Memory that it holds."""
        ...


class CostlyDrafter(Drafter, Protocol):
    """A source whose drafts take seconds, which count against what they save."""

    @property
    def capturing_s(self) -> float:
        """Seconds in which something was captured to be replayed later, so far: they count for no draft."""
        ...

    def seconds_of(self, slots_B: IntArray) -> tuple[float, float]:
        """What drafts for these samples take, as far as is known (0: not at all): to catch up with what they have said
        since they were drafted for last, once; and each further token of all drafts together."""
        ...


def drafted_cells(greedy_B: NDArray[np.bool_], depth: int, confidence_B: FloatArray) -> IntArray:
    """[B]: cells of tokens that a draft model proposes at a position in the draft, with the probabilities that it gives
    them."""
    first, greedy = _cells_at(depth)
    confidences_B = np.fmin(np.fmax(confidence_B * NUM_CONFIDENCES, 0), NUM_CONFIDENCES - 1)  # NaN is none
    return greedy_B * (greedy - first) + first + confidences_B.astype(np.int64)


@cache
def _cells_at(depth: int) -> tuple[int, int]:
    """The cells of no confidence at a position in a draft, of a sample that draws and of one that is greedy."""
    bucket = int(np.searchsorted(DEPTHS, depth, side="right"))
    first, greedy = (int(np.ravel_multi_index((kind, MODEL, 0, bucket, 0), CELLS)) for kind in (0, 1))
    return first, greedy


class PoolDrafter(TextPool):
    """Drafts from the pool of known texts."""

    def propose(self, asked: Asked, most: int, acceptance_C: FloatArray, least: float) -> DraftTokens:
        """See Drafter.propose."""
        drafts = DraftTokens.none(len(asked.slots_B), most)
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
            drafts.token_ids_BK,
            drafts.cells_BK,
            drafts.survival_BK,
            drafts.lengths_B,
        )
        return drafts
