"""The experts that the engine's routers chose for the tokens of a sample, layer by layer: numbers, one after another.

A token has K numbers for each layer that is a mixture of experts, in a byte each, or in two where there are more than
256 experts. The prompt's are there once for all samples of a group (`PartialRollout.take`).

Free of torch and numpy. Shapes: T tokens, L layers that are mixtures, K experts for each token, W = L K numbers of a
token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_IN_BYTE = 256
"""Experts of a layer whose numbers go into a byte."""


@dataclass(frozen=True)
class Experts:
    """Those of a sample.

    prompt:   of each token of the prompt
    response: of each token of the response, replies included, that the engine has read: not of the last one
    """

    prompt: bytes
    response: bytes

    @classmethod
    def of(cls, numbers_TW: NDArray[np.unsignedinteger], prompt_tokens: int) -> Self:
        """Those of the tokens of prompt and response, `bytes_of` each number."""
        return cls(numbers_TW[:prompt_tokens].tobytes(), numbers_TW[prompt_tokens:].tobytes())


def bytes_of(num_experts: int) -> int:
    """Size of each number of so many experts, which is an unsigned integer."""
    return 1 if num_experts <= MOST_IN_BYTE else 2
