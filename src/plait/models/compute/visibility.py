"""What a token of a packed row sees: a rule over four numbers of each token.

A token sees the tokens before it in its own segment and in the prompt of its group, as far back as the window goes.

Shapes: T tokens of the row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from plait.data.packed import PackedBatch

Array = np.ndarray[Any, np.dtype[np.int32]]


class Places(NamedTuple):
    """What the rule asks of tokens, all of one shape: NumPy arrays or tensors, int32."""

    group: Any
    segment: Any
    position: Any
    """In the sample: that of a continuation goes on where its prompt ends."""
    prompt: Any
    """1 for a token of a prompt, else 0."""

    def of(self, tokens: Any) -> Places:
        """The places of some tokens, in the shape of the index (NumPy or torch) that chooses them."""
        return Places(*(column[tokens] for column in self))


def places(batch: PackedBatch) -> Places:
    """The places of every token of the row, [T] each, on the host."""
    columns: list[tuple[Array, ...]] = []
    segment = 0
    for number, group in enumerate(batch.groups):
        for index, span in enumerate((group.prompt, *group.responses)):
            first = 0 if index == 0 else group.prompt.length
            positions = np.arange(first, first + span.length, dtype=np.int32)
            columns.append(
                (
                    np.full_like(positions, number),
                    np.full_like(positions, segment),
                    positions,
                    np.full_like(positions, index == 0),
                )
            )
            segment += 1
    return Places(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def sees(query: Places, key: Places, window: int | None) -> Any:
    """Whether tokens see tokens, in the shape that both broadcast to."""
    behind = query.position - key.position
    seen = (behind >= 0) & (query.group == key.group) & ((query.segment == key.segment) | (key.prompt == 1))
    return seen if window is None else seen & (behind < window)
