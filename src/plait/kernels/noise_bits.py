"""The noise of `kernels.noise` as compiled functions of single keys; for those that draw, and for those that draft
draws.

Imports no torch. Keys and ids are uint64.
"""

from __future__ import annotations

import math

import numpy as np

from plait.compiled import njit

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
UNIFORM_BITS = 52
"""(bits + 1/2) / 2**52 is exact in float64 and lies strictly between 0 and 1."""

_GOLDEN, _MIX_1, _MIX_2 = np.uint64(GOLDEN), np.uint64(MIX_1), np.uint64(MIX_2)
_S27, _S30, _S31, _S12 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(64 - UNIFORM_BITS)
_SCALE = 2.0**-UNIFORM_BITS


@njit(nogil=True, error_model="numpy")
def mix(bits):
    """As `noise.mix`."""
    bits = (bits ^ (bits >> _S30)) * _MIX_1
    bits = (bits ^ (bits >> _S27)) * _MIX_2
    return bits ^ (bits >> _S31)


@njit(nogil=True, error_model="numpy")
def draw_key(sample_key, place):
    """As `noise.draw_keys`."""
    return mix(sample_key + (place + np.uint64(1)) * _GOLDEN)


@njit(nogil=True, error_model="numpy")
def uniform(key, token_id):
    """As `noise.uniform`."""
    bits = mix(key + mix(token_id + _GOLDEN)) >> _S12
    return (np.float64(bits) + 0.5) * _SCALE


@njit(nogil=True, error_model="numpy")
def gumbel(key, token_id):
    """A standard Gumbel variable of the same."""
    return -math.log(-math.log(uniform(key, token_id)))
