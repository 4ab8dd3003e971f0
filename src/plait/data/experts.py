"""The experts that the engine's routers chose for the tokens of a sample, layer by layer: numbers, one after another.

A token has K numbers for each layer that is a mixture of experts, in a byte each, or in two where there are more than
256 experts. The prompt's are there once for all samples of a group (`with_prompt_of`).

Shapes: T tokens of a packed row, L layers that are mixtures, K experts for each token, W = L K numbers of a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from plait.data.packed import PackedBatch
    from plait.data.records import Sample

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
        """Those of the tokens of prompt and response, as `dtype_of` has them."""
        return cls(numbers_TW[:prompt_tokens].tobytes(), numbers_TW[prompt_tokens:].tobytes())


def dtype_of(num_experts: int) -> np.dtype[np.unsignedinteger]:
    """That numbers of so many experts are kept in."""
    return np.dtype(np.uint8 if num_experts <= MOST_IN_BYTE else np.uint16)


class Drawn(Protocol):
    """What a sample says of its tokens; see `data.records.Sample`."""

    @property
    def experts(self) -> Experts | None: ...


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """Those of the tokens of a packed row, on the host.

    numbers_TLK: uint8 or uint16; any where they are not known
    known_T:     bool
    """

    numbers_TLK: NDArray[np.unsignedinteger]
    known_T: NDArray[np.bool_]


def packed_experts(
    batch: PackedBatch, groups: Sequence[Sequence[Drawn]], sizes: tuple[int, int, int]
) -> PackedExperts | None:
    """The experts of the tokens of a row; None: no sample says any, as where they were given.

    Args:
        groups: the samples of each group of the row.
        sizes: (L, K, experts of a layer).

    Raises:
        ValueError: they are not of such sizes.
    """
    layers, top_k, num_experts = sizes
    dtype, width = dtype_of(num_experts), layers * top_k
    numbers_TW = np.zeros((batch.num_tokens, width), dtype)
    known_T = np.zeros(batch.num_tokens, np.bool_)

    def put(start: int, told: bytes) -> None:
        numbers = np.frombuffer(told, dtype)
        if numbers.size % width or numbers.max(initial=0) >= num_experts:
            raise ValueError(f"{len(told)} bytes are not {width} numbers of {num_experts} experts for each token")
        stop = start + numbers.size // width
        numbers_TW[start:stop], known_T[start:stop] = numbers.reshape(-1, width), True

    root = batch.root.length
    for group, samples in zip(batch.groups, groups, strict=True):
        telling = [(span, s.experts) for span, s in zip(group.responses, samples, strict=True) if s.experts is not None]
        if telling:
            prompt = telling[0][1].prompt
            if root and not known_T[0]:
                put(batch.root.start, prompt[: root * width * dtype.itemsize])
            put(group.prompt.start, prompt[root * width * dtype.itemsize :])
        for span, experts in telling:
            put(span.start, experts.response)
    return PackedExperts(numbers_TW.reshape(-1, layers, top_k), known_T) if known_T.any() else None


Told = TypeVar("Told", bound="Sample")


def with_prompt_of(sample: Told, others: Iterable[Sample]) -> Told:
    """The sample with the prompt's experts of the first of others of its prompt that says any: where the prompt was
    computed several times, roundings may have chosen others."""
    prompt = next((other.experts.prompt for other in others if other.experts is not None), None)
    if sample.experts is None or prompt is None:
        return sample
    return replace(sample, experts=replace(sample.experts, prompt=prompt))
