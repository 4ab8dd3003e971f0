"""What a token of a packed row sees: a rule over five numbers of each token.

A token sees the tokens before it in its own segment, in the prompt of its group and in the root of the row, as far back
as the window goes.

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
    """In the sample: that of a continuation goes on where its prompt ends, that of a prompt where the root ends."""
    prompt: Any
    """1 for a token of a prompt, else 0."""
    root: Any
    """1 for a token of the root, else 0."""

    def of(self, tokens: Any) -> Places:
        """The places of some tokens, in the shape of the index (NumPy or torch) that chooses them."""
        return Places(*(column[tokens] for column in self))


def places(batch: PackedBatch) -> Places:
    """The places of every token of the row, [T] each, on the host."""
    segments = [_segment(batch.root.length, 0, group=-1, segment=-1, root=1)]
    for number, group in enumerate(batch.groups):
        segments.append(_segment(group.prompt.length, batch.root.length, group=number, segment=len(segments), prompt=1))
        above = batch.root.length + group.prompt.length
        segments += [
            _segment(span.length, above, group=number, segment=len(segments) + index)
            for index, span in enumerate(group.responses)
        ]
    return Places(*(np.concatenate(column) for column in zip(*segments, strict=True)))


def _segment(length: int, first: int, *, group: int, segment: int, prompt: int = 0, root: int = 0) -> Places:
    """The places of a segment's tokens, the first of which has the position `first`."""
    positions = np.arange(first, first + length, dtype=np.int32)
    group_T, segment_T, prompt_T, root_T = (np.full_like(positions, n) for n in (group, segment, prompt, root))
    return Places(group_T, segment_T, positions, prompt_T, root_T)


def sees(query: Places, key: Places, window: int | None) -> Any:
    """Whether tokens see tokens, in the shape that both broadcast to."""
    behind = query.position - key.position
    in_group = (query.group == key.group) & ((query.segment == key.segment) | (key.prompt == 1))
    seen = (behind >= 0) & (in_group | (key.root == 1))
    return seen if window is None else seen & (behind < window)
