"""The experts that the tokens of a packed row are to go to, out of those that its samples say (`data.experts`).

Shapes: T tokens of a packed row, L layers that are mixtures, K experts for each token, W = L K numbers of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from plait.data.experts import Experts, bytes_of
from plait.data.packed import PackedBatch


class Drawn(Protocol):
    """What a sample says of its tokens; see `data.records.Sample`."""

    @property
    def experts(self) -> Experts | None: ...


@dataclass(frozen=True, eq=False)
class TokenExperts:
    """Those of the tokens of a packed row, on the host.

    numbers_TLK: uint8 or uint16; any where they are not known
    known_T:     bool
    counted_T:   bool: the known ones of responses, which are in one row alone, whatever samples are packed together
    """

    numbers_TLK: NDArray[np.unsignedinteger]
    known_T: NDArray[np.bool_]
    counted_T: NDArray[np.bool_]


def token_experts(
    batch: PackedBatch, groups: Sequence[Sequence[Drawn]], sizes: tuple[int, int, int]
) -> TokenExperts | None:
    """The experts of the tokens of a row; None: no sample says any, as where they were given.

    Args:
        groups: the samples of each group of the row.
        sizes: (L, K, experts of a layer).

    Raises:
        ValueError: they are not of such sizes.
    """
    layers, top_k, num_experts = sizes
    dtype, width = np.dtype(f"u{bytes_of(num_experts)}"), layers * top_k
    numbers_TW = np.zeros((batch.num_tokens, width), dtype)
    known_T, counted_T = np.zeros((2, batch.num_tokens), np.bool_)

    def put(start: int, told: bytes) -> slice:
        numbers = np.frombuffer(told, dtype)
        if numbers.size % width or numbers.max(initial=0) >= num_experts:
            raise ValueError(f"{len(told)} bytes are not {width} numbers of {num_experts} experts for each token")
        at = slice(start, start + numbers.size // width)
        numbers_TW[at], known_T[at] = numbers.reshape(-1, width), True
        return at

    root = batch.root.length
    for group, samples in zip(batch.groups, groups, strict=True):
        telling = [(span, s.experts) for span, s in zip(group.responses, samples, strict=True) if s.experts is not None]
        if telling:
            prompt = telling[0][1].prompt
            if root and not known_T[0]:
                put(batch.root.start, prompt[: root * width * dtype.itemsize])
            put(group.prompt.start, prompt[root * width * dtype.itemsize :])
        for span, experts in telling:
            counted_T[put(span.start, experts.response)] = True
    return TokenExperts(numbers_TW.reshape(-1, layers, top_k), known_T, counted_T) if known_T.any() else None
