"""What CUDA graphs of captured steps hold. Torch-free."""

from __future__ import annotations

import math

from plait.cost.lengths import Lengths
from plait.generation.settings import MOST_GRAPHS_OF_PROMPTS, MOST_REPLAYED, MOST_REPLAYED_CHUNKS
from plait.models.shape import ModelShape
from plait.training.memory import BYTES

GRAPHS = "results of CUDA graphs, at most"


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
        most_new_tokens: of a sample in a step, with what is drafted.
        is_last: whether the stage is the last one.
    """
    if shape.recurrent:
        return 0  # no step is replayed
    shortest, longest = map(exponent, contexts)
    rows = 0
    for power in range(exponent(most_new_tokens) + 1):
        new_tokens = 1 << power
        most = min(MOST_REPLAYED, 1 << exponent(running * new_tokens))
        rows += (2 * most - new_tokens) * (power + 1)
    width = shape.vocabulary if is_last else shape.hidden
    return (longest - shortest + 1) * rows * width * BYTES[dtype]


def prompt_graph_bytes(shape: ModelShape, dtype: str, *, is_first: bool = True) -> int:
    """The same of graphs with prompts beside samples that decode: hidden states of as many rows as there may be; of
    stages behind the first those that come from the one before as well."""
    if shape.recurrent:
        return 0
    rows = 2 * MOST_REPLAYED + MOST_REPLAYED_CHUNKS
    return MOST_GRAPHS_OF_PROMPTS * rows * shape.hidden * BYTES[dtype] * (1 if is_first else 2)


def exponent(number: int) -> int:
    """The exponent of the power of two that is as large, or the next larger one."""
    return max(0, number - 1).bit_length()
