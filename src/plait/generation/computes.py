"""What computes the forward of a step.

Shapes: T tokens of a step, N of any, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from plait.models.compute.attention import AttentionContext


class Computes(Protocol):
    """What a step asks of a model: a `LanguageModel` does it alone, or the ranks that have one in stages together."""

    def hidden(
        self, token_ids_T: Tensor, position_ids_T: Tensor, context: AttentionContext, *, read: Tensor | None = None
    ) -> Tensor:
        """See BackboneModel.hidden. [T, H] of this rank's stage."""
        ...

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """See LanguageModel.logits. [N, V]; where the stage is not the last, zeros that nobody reads."""
        ...
