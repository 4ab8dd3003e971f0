"""What a GPU takes to capture steps of decoding before it replays them. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plait.cost.decoding import SteadySteps
from plait.cost.graph_memory import exponent
from plait.cost.layer_times import LayerTimes, Terms, added
from plait.cost.workload import Workload
from plait.generation.settings import MOST_REPLAYED


def capturing(workload: Workload, of_models: Sequence[LayerTimes], pieces: Sequence[SteadySteps]) -> Terms:
    """Seconds in each rollout of a process that gives its graphs back in between.

    Args:
        of_models: of the one that generates, and of a draft model.
        pieces: of one instance.
    """
    if workload.pools_stay:
        return {}
    prompt_tokens = workload.lengths.prompts.mean
    return added(*(_capturing(times, pieces, prompt_tokens) for times in of_models))


def _capturing(times: LayerTimes, pieces: Sequence[SteadySteps], prompt_tokens: float) -> Terms:
    profile = times.profile
    if profile is None or not profile.capture_s:
        return {}
    layers = math.ceil(times.work.shape.layers / times.layout.parallelism.pp)
    return {"capturing": num_captured(pieces, prompt_tokens) * layers * profile.capture_s}


def num_captured(pieces: Sequence[SteadySteps], prompt_tokens: float) -> int:
    """Graphs that are captured of these steps (`generation.captured_step.Size`): one for each power of two of samples
    and of tokens of context, about, as the longest sample is taken to be no longer than the others.

    Args:
        prompt_tokens: of each sample, in the mean.
    """
    sizes = {
        (exponent(piece.running), exponent(math.ceil(prompt_tokens + piece.said / piece.running)))
        for piece in pieces
        if piece.running <= MOST_REPLAYED
    }
    return len(sizes)
