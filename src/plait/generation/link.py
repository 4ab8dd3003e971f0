"""What comes to this rank's layers from the ranks that have those before, and goes to the ranks that have those behind.

Shapes: T tokens of a step, N of any, H hidden size, V vocabulary, W numbers of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Link(Protocol):
    """The two ends of a rank's stage of a model."""

    def receive(self, num_tokens: int) -> Tensor | None:
        """A step of so many tokens begins: hidden states [T, H] of the stage before; None on the first."""
        ...

    def send(self, hidden_TH: Tensor) -> None:
        """Give hidden states to the next stage; nothing on the last. They must stay as they are."""
        ...

    def agree(self, here: bool) -> bool:
        """Whether all stages say so; each asks before the same step."""
        ...

    def of_all_layers(self, own_NW: Tensor, columns: Sequence[int]) -> Tensor:
        """What each stage has of tokens, side by side; all stages ask for the same tokens.

        Args:
            own_NW: of this stage, int16.
            columns: how many numbers each stage has of a token.

        Returns:
            [N, sum of `columns`] int16, on the same device.
        """
        ...


class NoLink:
    """`Link` of a rank that has all layers."""

    def receive(self, num_tokens: int) -> None:
        """See Link.receive."""

    def send(self, hidden_TH: Tensor) -> None:
        """See Link.send."""

    def agree(self, here: bool) -> bool:
        """See Link.agree."""
        return here

    def of_all_layers(self, own_NW: Tensor, columns: Sequence[int]) -> Tensor:
        """See Link.of_all_layers."""
        return own_NW


NO_LINK = NoLink()


def unread(hidden_TH: Tensor, count: int, vocabulary: int) -> Tensor:
    """Logits [N, V] on a stage that has no head: zeros that nobody reads, of the dtype of its hidden states."""
    return hidden_TH.new_zeros(1, 1).expand(count, vocabulary)
