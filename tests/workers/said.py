"""What samples say, in a form in which processes tell it and runs are compared."""

from __future__ import annotations

from collections.abc import Sequence

from plait.data.records import Sample
from plait.policy.step import Key

Said = dict[Key, tuple[tuple[int, ...], tuple[float, ...]]]
"""Tokens and log-probs."""


def said_by(samples: Sequence[Sample]) -> Said:
    return {(sample.prompt.uid, sample.index): (sample.token_ids, sample.logprobs) for sample in samples}
