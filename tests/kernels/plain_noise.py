"""The noise of single keys as plainly as it can be said: the oracle of tensors and of compiled functions."""

from __future__ import annotations

import math

from plait.kernels.noise import mix
from plait.kernels.noise_bits import GOLDEN, UNIFORM_BITS


def draw_key_of(sample_key: int, position: int) -> int:
    """Key of the draw at a position (0 = first response token)."""
    return mix(sample_key + (position + 1) * GOLDEN)


def uniform_of(draw_key: int, token_id: int) -> float:
    """The uniform variable in (0, 1) of a token (or tail stream) in a draw."""
    bits = mix(draw_key + mix(token_id + GOLDEN))
    return ((bits >> (64 - UNIFORM_BITS)) + 0.5) * 2.0**-UNIFORM_BITS


def gumbel_of(draw_key: int, token_id: int) -> float:
    """The standard Gumbel variable of a token (or tail stream) in a draw."""
    return -math.log(-math.log(uniform_of(draw_key, token_id)))
