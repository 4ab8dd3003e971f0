"""What a GPU takes to capture steps of decoding before it replays them, and what graphs hold. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from plait.cost.decoding import SteadySteps
from plait.cost.layer_times import LayerTimes, Terms, added
from plait.cost.lengths import Lengths
from plait.cost.profile import MOST_REPLAYED
from plait.cost.workload import Workload
from plait.generation.settings import DRAFT_MODEL_TOKENS
from plait.layout.mesh import Parallelism
from plait.models.shape import ModelShape
from plait.training.memory import BYTES

GRAPHS = "logits of CUDA graphs, at most"


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
    sizes, profile = times.layout.parallelism, times.profile
    if profile is None or not profile.capture_s or sizes.tp * sizes.pp > 1:
        return {}
    return {"capturing": num_captured(pieces, prompt_tokens) * times.work.shape.layers * profile.capture_s}


def num_captured(pieces: Sequence[SteadySteps], prompt_tokens: float) -> int:
    """Graphs that are captured of these steps (`generation.captured_step.Size`): one for each power of two of samples and of
    tokens of context, about, as the longest sample is taken to be no longer than the others.

    Args:
        prompt_tokens: of each sample, in the mean.
    """
    sizes = {
        (_power(piece.running), _power(math.ceil(prompt_tokens + piece.said / piece.running)))
        for piece in pieces
        if piece.running <= MOST_REPLAYED
    }
    return len(sizes)


def held_by_graphs(workload: Workload, shape: ModelShape, sizes: Parallelism, share: int) -> int:
    """`graph_bytes` of an instance of a workload, with those of a draft model, which is whole on one of its devices.

    Args:
        sizes: of the instance; its parts have no graphs.
        share: samples that it generates.
    """
    if workload.device != "cuda" or workload.elsewhere:
        return 0
    if (draft := workload.draft_model) is not None:
        alone = replace(workload, draft_model=None, most_new_tokens=DRAFT_MODEL_TOKENS)
        of_draft = held_by_graphs(alone, draft, Parallelism(), share)
        return of_draft + held_by_graphs(replace(workload, draft_model=None), shape, sizes, share)
    if sizes.tp * sizes.pp > 1:
        return 0
    prompts, responses = workload.lengths.prompts, workload.lengths.responses
    contexts = first_context(prompts), prompts.longest + responses.longest
    running = min(share, workload.max_running)
    return graph_bytes(shape, workload.dtype, running, contexts, workload.most_new_tokens)


def first_context(prompts: Lengths) -> int:
    """Tokens of a mean sample that decodes its first token."""
    return math.ceil(prompts.mean) + 1


def graph_bytes(
    shape: ModelShape, dtype: str, running: int, contexts: tuple[int, int], most_new_tokens: int = 1
) -> int:
    """Bytes that the graphs of an instance keep on its device: logits of as many rows as each has, in the compute
    dtype. All else that they compute in is one memory, and small. There is one graph for each power of two of tokens
    of context, of new tokens of a sample, of rows, which are at least as many as these, and of samples that may have as
    many rows.

    Args:
        running: samples at a time.
        contexts: tokens of the shortest and of the longest context.
        most_new_tokens: of a sample in a step, with what is guessed.
    """
    shortest, longest = map(_power, contexts)
    rows = 0
    for power in range(_power(most_new_tokens) + 1):
        width = 1 << power
        most = min(MOST_REPLAYED, 1 << _power(running * width))
        rows += (2 * most - width) * (power + 1)
    return (longest - shortest + 1) * rows * shape.vocabulary * BYTES[dtype]


def _power(number: int) -> int:
    """The exponent of the power of two that is as large, or the next larger one."""
    return max(0, number - 1).bit_length()
