"""What a model says of one micro-batch.

Shapes: T tokens of a packed row, H hidden size, R response tokens, N samples, in row order; K tokens of the vocabulary
at each place, J = K + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor


class Said(StrEnum):
    """What there is of each response token, or of each sample."""

    LOGPROBS = "logprobs"
    ENTROPIES = "entropies"
    VALUES = "values"
    SCORES = "scores"
    TOP_LOGPROBS = "top_logprobs"


@dataclass(frozen=True)
class Outputs:
    """What a model computed for one micro-batch: a scalar model values and scores, a language model the rest, of which
    a call that scores by its likeliest tokens gets these alone."""

    logprobs_R: Tensor | None = None
    entropies_R: Tensor | None = None
    likeliest_R: Tensor | None = None
    """bool: whether no token is likelier than the one that stands there."""
    values_R: Tensor | None = None
    scores_N: Tensor | None = None
    logprobs_at: Callable[[Tensor], Tensor] | None = None
    """Computes of int64 ids [R, K] the log-probs [R, J] of these tokens, and last of all others together;
    differentiable."""
    top: Tensor | None = None
    """[R, K + J]: ids of the likeliest tokens, and what `logprobs_at` gives of these."""

    @property
    def per_token(self) -> Tensor:
        """[R]: log-probs or values."""
        per_token_R = self.values_R if self.logprobs_R is None else self.logprobs_R
        assert per_token_R is not None, "a forward gives log-probs or values"
        return per_token_R

    @property
    def num_nonfinite(self) -> Tensor:
        """Numbers among log-probs, or values and scores, that are infinite or NaN: a scalar, int64, on their device."""
        parts = (self.logprobs_R, self.values_R, self.scores_N)
        counts = [(~part.detach().isfinite()).sum() for part in parts if part is not None]
        return torch.stack(counts).sum()
