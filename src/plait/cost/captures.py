"""What a GPU takes to capture steps of decoding before it replays them. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plait.cost.decoding import SteadySteps
from plait.cost.layer_times import LayerTimes, Terms
from plait.cost.profile import MOST_REPLAYED


def capturing(times: LayerTimes, pieces: Sequence[SteadySteps], prompt_tokens: float) -> Terms:
    """Seconds in each rollout of a process that gives its graphs back in between.

    Args:
        pieces: of one instance.
        prompt_tokens: of each sample, in the mean.
    """
    sizes, profile = times.layout.parallelism, times.profile
    if profile is None or not profile.capture_s or sizes.tp * sizes.pp > 1:
        return {}
    return {"capturing": num_captured(pieces, prompt_tokens) * times.work.shape.layers * profile.capture_s}


def num_captured(pieces: Sequence[SteadySteps], prompt_tokens: float) -> int:
    """Graphs that are captured of these steps (`generation.captured.Size`): one for each power of two of samples and of
    tokens of context, about, as the longest sample is taken to be no longer than the others."""
    sizes = {
        (_power(piece.running), _power(math.ceil(prompt_tokens + piece.said / piece.running)))
        for piece in pieces
        if piece.running <= MOST_REPLAYED
    }
    return len(sizes)


def _power(number: int) -> int:
    """The exponent of the power of two that is as large, or the next larger one."""
    return max(0, number - 1).bit_length()
