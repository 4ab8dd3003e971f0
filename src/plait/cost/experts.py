"""How unevenly a mixture's tokens and experts fall on the ranks of tensor parallelism, which wait for the slowest.

Where ranks have columns of all experts, all have the same. Where they have whole ones
(`layout.decoder.experts_stay_whole`), the rank whose experts are liked most has more tokens than the others, and what
few tokens reach is not the same on each. Torch-free.
"""

from __future__ import annotations

from math import log, sqrt
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from plait.layout.decoder import experts_stay_whole
from plait.models.shape import ModelShape

SPREAD = 0.25
"""Standard deviation of an expert's tokens, over their mean. The most used of 64 experts had 0.72 more than the mean,
after training with a loss that balances them (Wang et al. 2024, arXiv 2408.15664, table 2, 1B; 0.52 of 3B): of 64
normal numbers the largest is about sqrt(2 ln 64) deviations above the mean. What a run's own routers do,
`ROLE/expert_max_violation` says."""

Tokens = TypeVar("Tokens", float, NDArray[np.float64])


def are_whole(shape: ModelShape) -> bool:
    """Whether ranks of tensor parallelism have whole experts of a mixture of this shape."""
    return shape.expert_layers > 0 and experts_stay_whole(shape.expert_intermediate, shape.hidden)


def fullest(shape: ModelShape, tp: int) -> float:
    """The share of all pairs of a token and an expert that the rank of `tp` with most of them has.

    Of whole experts, ranks have equally many, or one more, whose tokens are independent of each other: the sum of n has
    a deviation of SPREAD / sqrt(n) of its mean, and the largest of tp such sums is sqrt(2 ln tp) deviations above it.
    """
    if tp == 1 or not are_whole(shape):
        return 1 / tp
    most = -(-shape.experts // tp)
    return min(1.0, most / shape.experts * (1 + SPREAD * sqrt(2 * log(tp) / most)))


def reached(shape: ModelShape, tokens: Tokens, tp: int) -> Tokens:
    """Experts, or so many columns as one has, that the rank of `tp` which reads most of them reads in a forward.

    At most as many as pairs of a token and an expert fall on it. These are few numbers that are independent of each
    other: of tp of them with mean m the largest is about m + sqrt(2 m ln tp).
    """
    pairs: Any = tokens * shape.experts_per_token / tp
    most: Any = shape.experts / tp
    if tp > 1 and are_whole(shape):
        most, pairs = -(-shape.experts // tp), pairs + np.sqrt(2 * log(tp) * pairs)
    least: Any = np.minimum(most, pairs)
    return least


def pair_bytes(shape: ModelShape, width: int, tp: int, *, fused: bool, by_masks: bool = False) -> int:
    """Bytes of a token in a layer of experts that the fullest of `tp` ranks keeps for the backward, beyond what
    `working_memory.layer_bytes` says, which divides the inner elements of a token evenly.

    Of each pair of a token and an expert: what enters and what the expert gives, and four times its inner elements, as
    experts are computed by the family's own code. Of experts that are sharded by columns, every rank has all pairs.

    Args:
        by_masks: in a forward without a backward, on a GPU (`passing_elements`).
    """
    pairs, share = shape.experts_per_token * shape.expert_layers / shape.layers, fullest(shape, tp)
    evenly = (3 if fused else 4) * shape.expert_intermediate / tp
    ends = 2 * shape.hidden * (share if are_whole(shape) else 1.0)
    elements = passing_elements(shape, tp) if by_masks else ends + 4 * shape.expert_intermediate * share
    return round(width * pairs * (elements - evenly))


def passing_elements(shape: ModelShape, tp: int) -> float:
    """Numbers of a pair of a token and an expert at the fullest moment of a forward without a backward, on a GPU.

    Every rank has rows of all pairs, those of other ranks too where experts are whole, as it asks for no number
    (`parallel.whole_experts`). Either what entered and what the expert gives, that weighed and once more in the order
    of tokens; or what entered, gate and up, their product and the activated gate. Masks are not counted, 2 % of it.
    """
    inner = shape.expert_intermediate / (1 if are_whole(shape) else tp)
    return max(4 * shape.hidden, shape.hidden + 4 * inner)
