"""Which experts tokens went to (`Sample.experts`), in the form in which it travels between ranks: what is of a prompt
goes once for all its samples that travel together and say the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.data.experts import Experts
from plait.data.records import Sample

NONE = -1
"""The bytes of a sample, or of a prompt, that says none."""


def pack_experts(
    samples: Sequence[Sample], places: Sequence[int], num_prompts: int
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Those of samples, as arrays.

    Args:
        places: of each sample's prompt among those that travel.

    Returns:
        int64 [prompts + 2 samples], the bytes of each: the prompts, the responses, and for each sample its prompt where
        that is another than the first one of the same place; and uint8 [all bytes], one after another. Both [0] where
        no sample says any.
    """
    if all(sample.experts is None for sample in samples):
        return np.zeros(0, np.int64), np.zeros(0, np.uint8)
    prompts: dict[int, bytes] = {}
    for place, sample in zip(places, samples, strict=True):
        if sample.experts is not None:
            prompts.setdefault(place, sample.experts.prompt)
    parts = [prompts.get(place) for place in range(num_prompts)]
    told = [sample.experts for sample in samples]
    parts += [None if experts is None else experts.response for experts in told]
    others = zip(told, map(prompts.get, places), strict=True)
    parts += [None if experts is None or experts.prompt == first else experts.prompt for experts, first in others]
    sizes = [NONE if part is None else len(part) for part in parts]
    return np.array(sizes, dtype=np.int64), np.frombuffer(b"".join(part or b"" for part in parts), np.uint8)


def unpack_experts(arrays: Sequence[NDArray[Any]], places: Sequence[int]) -> list[Experts | None]:
    """What `pack_experts` packed, in its shapes, for each sample."""
    sizes, joined = arrays[0].tolist(), arrays[1].tobytes()
    if not sizes:
        return [None] * len(places)
    parts: list[bytes | None] = []
    at = 0
    for size in sizes:
        parts.append(None if size == NONE else joined[at : at + size])
        at += max(size, 0)
    num_prompts = len(parts) - 2 * len(places)
    responses, others = parts[num_prompts:][: len(places)], parts[num_prompts + len(places) :]
    return [
        None if response is None else Experts((parts[place] if other is None else other) or b"", response)
        for place, response, other in zip(places, responses, others, strict=True)
    ]
