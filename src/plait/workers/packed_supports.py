"""What tokens were drawn from (`Sample.supports`), in the forms in which it travels between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def pack_supports(supports: Sequence[Sequence[bytes] | None]) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """What the tokens of samples were drawn from, as arrays.

    Returns:
        int32 [samples + sets], for each sample that says it its place and the bytes of each of its sets; and uint8
        [bytes of all sets], one after another. Both [0] where none says it.
    """
    telling = [(place, sets) for place, sets in enumerate(supports) if sets]
    numbers = [number for place, sets in telling for number in (place, *map(len, sets))]
    joined = b"".join(kept for _, sets in telling for kept in sets)
    return np.array(numbers, dtype=np.int32), np.frombuffer(joined, np.uint8)


def unpack_supports(arrays: Sequence[NDArray[Any]], num_tokens: Sequence[int]) -> list[tuple[bytes, ...] | None]:
    """What `pack_supports` packed, in its shapes; None for samples that do not say it.

    Args:
        num_tokens: that each sample has drawn.
    """
    supports: list[tuple[bytes, ...] | None] = [None] * len(num_tokens)
    numbers, joined = arrays[0].tolist(), arrays[1].tobytes()
    at = start = 0
    while at < len(numbers):
        place = numbers[at]
        sets = []
        for size in numbers[at + 1 : at + 1 + num_tokens[place]]:
            sets.append(joined[start : start + size])
            start += size
        supports[place] = tuple(sets)
        at += 1 + len(sets)
    return supports
