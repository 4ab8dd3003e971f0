"""How far two ways say the same: with the same noise, tokens differ only where two nearly tie."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from plait.data.records import Sample

FAR = {"float32": 1e-3, "bfloat16": 0.3}
"""How far log-probs of one token behind the same tokens may be, by ways that round otherwise, among some thousand."""


class Alike(NamedTuple):
    """What samples of two ways come to."""

    same: int
    """Tokens before the first that differs, of all samples."""
    total: int
    """Tokens of all samples."""
    off: float
    """The largest difference between log-probs of tokens that are the same."""

    def is_far(self, dtype: str) -> bool:
        """Whether they do not compute the same."""
        return not self.off <= FAR[dtype]

    def __str__(self) -> str:
        return (
            f"{self.same} of {self.total} tokens stand before the first that differs, "
            f"log-probs differ by {self.off:.2g} at most"
        )


def alike(found: Iterable[Sample], expected: Iterable[Sample]) -> Alike:
    """Compare the samples of two ways, which are of the same prompts."""
    others = {(sample.prompt.uid, sample.index): sample for sample in expected}
    same = total = 0
    off = 0.0
    for sample in found:
        other = others.pop((sample.prompt.uid, sample.index))
        pairs = zip(sample.token_ids, other.token_ids, sample.logprobs, other.logprobs, strict=True)
        is_same = True
        for token_id, other_id, logprob, other_logprob in pairs:
            is_same &= token_id == other_id
            if is_same and not abs(logprob - other_logprob) <= off:  # NaN counts, too
                off = abs(logprob - other_logprob)
            same += is_same
            total += 1
    assert not others, f"{len(others)} samples are missing"
    return Alike(same, total, off)
