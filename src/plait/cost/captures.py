"""What a GPU takes to capture steps of decoding before it replays them, and what graphs hold. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from plait.cost.decoding import SteadySteps
from plait.cost.layer_times import LayerTimes, Terms, added
from plait.cost.lengths import Lengths
from plait.cost.workload import Workload
from plait.generation.settings import (
    DRAFT_MODEL_TOKENS,
    MOST_GRAPHS_OF_PROMPTS,
    MOST_REPLAYED,
    MOST_REPLAYED_CHUNKS,
)
from plait.models.shape import ModelShape
from plait.training.memory import BYTES

GRAPHS = "results of CUDA graphs, at most"


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
        (_power(piece.running), _power(math.ceil(prompt_tokens + piece.said / piece.running)))
        for piece in pieces
        if piece.running <= MOST_REPLAYED
    }
    return len(sizes)


def held_by_graphs(workload: Workload, shape: ModelShape, share: int, stages: int = 1) -> tuple[int, ...]:
    """`graph_bytes` on a device of each stage of an instance of a workload, with those of a draft model, which is whole
    on one of its devices.

    Args:
        share: samples that it generates.
    """
    if workload.device != "cuda" or workload.elsewhere:
        return (0,) * stages
    prompts, responses = workload.lengths.prompts, workload.lengths.responses
    contexts = first_context(prompts), prompts.longest + responses.longest
    running, draft, of_draft = min(share, workload.max_running), workload.draft_model, 0
    if draft is not None:
        of_draft = graph_bytes(draft, workload.dtype, running, contexts, DRAFT_MODEL_TOKENS)
    of_stage = partial(graph_bytes, shape, workload.dtype, running, contexts, workload.most_new_tokens)
    of_prompts = partial(prompt_graph_bytes, shape, workload.dtype)
    return tuple(
        of_draft + of_stage(is_last=stage == stages - 1) + of_prompts(is_first=stage == 0) for stage in range(stages)
    )


def first_context(prompts: Lengths) -> int:
    """Tokens of a mean sample that decodes its first token."""
    return math.ceil(prompts.mean) + 1


def graph_bytes(
    shape: ModelShape,
    dtype: str,
    running: int,
    contexts: tuple[int, int],
    most_new_tokens: int = 1,
    *,
    is_last: bool = True,
) -> int:
    """Bytes that the graphs of an instance keep on a device of a stage: what each computes of as many rows as it has,
    in the compute dtype. All else that they compute in is one memory, and small.

    There is one graph for each power of two of tokens of context, of new tokens of a sample, of rows, which are at
    least as many as these, and of samples that may have as many rows. It gives logits, which ranks of tp all have
    whole; on stages before the last hidden states.

    Args:
        running: samples at a time.
        contexts: tokens of the shortest and of the longest context.
        most_new_tokens: of a sample in a step, with what is guessed.
        is_last: whether the stage is the last one.
    """
    shortest, longest = map(_power, contexts)
    rows = 0
    for power in range(_power(most_new_tokens) + 1):
        new_tokens = 1 << power
        most = min(MOST_REPLAYED, 1 << _power(running * new_tokens))
        rows += (2 * most - new_tokens) * (power + 1)
    width = shape.vocabulary if is_last else shape.hidden
    return (longest - shortest + 1) * rows * width * BYTES[dtype]


def prompt_graph_bytes(shape: ModelShape, dtype: str, *, is_first: bool = True) -> int:
    """The same of graphs with prompts beside samples that decode: hidden states of as many rows as there may be; of
    stages behind the first those that come from the one before as well."""
    rows = 2 * MOST_REPLAYED + MOST_REPLAYED_CHUNKS
    return MOST_GRAPHS_OF_PROMPTS * rows * shape.hidden * BYTES[dtype] * (1 if is_first else 2)


def _power(number: int) -> int:
    """The exponent of the power of two that is as large, or the next larger one."""
    return max(0, number - 1).bit_length()
