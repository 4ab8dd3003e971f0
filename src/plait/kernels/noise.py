"""Stateless noise: the noise of a token is a function of its key and its id, never of call order or batch.

A sample's key folds (run seed, rollout index, prompt uid, sample index, attempt, 0); with the position in the
response it gives the key of one draw; with a token id that gives the 64 bits behind one Gumbel variable. The mixer is
the finaliser of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, in the
constants of Stafford's variant 13).

Shapes: any; tensors are int64 and wrap modulo 2**64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.kernels.noise_bits import GOLDEN, MASK, MIX_1, MIX_2, UNIFORM_BITS

TAIL_GUMBEL = -1
"""In place of a token id: the Gumbel variable of all tokens outside the candidates together."""
TAIL_UNIFORM = -2
"""In place of a token id: the uniform that picks the token within the tail."""


@dataclass(frozen=True)
class NoiseKey:
    """What the noise of a request depends on beside prompt uid, sample index and position."""

    seed: int
    """The run's seed."""
    rollout: int = 0
    """Which rollout of the run (usually the step)."""
    attempt: int = 0
    """Counts re-draws of a sample that was thrown away."""

    def sample_key(self, prompt_uid: int, index: int) -> int:
        """64-bit key of one sample of one prompt instance."""
        return fold(self.seed, self.rollout, prompt_uid, index, self.attempt, 0)


def mix(bits: int) -> int:
    """A bijection of 64-bit integers in which every input bit moves every output bit."""
    bits &= MASK
    bits = ((bits ^ (bits >> 30)) * MIX_1) & MASK
    bits = ((bits ^ (bits >> 27)) * MIX_2) & MASK
    return bits ^ (bits >> 31)


def fold(*values: int) -> int:
    """One 64-bit key from integers; their order matters, and so does their number."""
    key = len(values)
    for value in values:
        key = mix(key * GOLDEN + mix(value + GOLDEN))
    return key


def signed(bits: int) -> int:
    """The int64 with the same 64 bits, as a tensor can hold it."""
    bits &= MASK
    return bits - 2**64 if bits >= 2**63 else bits


def draw_keys(sample_keys: Tensor, positions: Tensor) -> Tensor:
    """Keys of the draws at positions (0 = first response token): int64 of one shape, to that shape."""
    return _mix(sample_keys + (positions + 1) * signed(GOLDEN))


@dataclass(frozen=True)
class DrawNoise:
    """Which noise draws have; int64 [B], of B draws. A GPU makes the keys of the draws from these while it draws.

    sample_keys: of the samples (`NoiseKey.sample_key`)
    positions:   in their responses, 0 = first token
    """

    sample_keys: Tensor
    positions: Tensor

    def __getitem__(self, rows: slice) -> DrawNoise:
        """That of some of the draws."""
        return DrawNoise(self.sample_keys[rows], self.positions[rows])

    @property
    def keys(self) -> Tensor:
        """Keys of the draws, int64 [B]."""
        return draw_keys(self.sample_keys, self.positions)


def uniform(keys: Tensor, token_ids: Tensor | int) -> Tensor:
    """Uniform variables in (0, 1) of tokens (or tail streams) in draws: int64 of shapes that broadcast, to float64 of
    their common shape."""
    ids = torch.as_tensor(token_ids, dtype=torch.int64, device=keys.device)
    bits = _mix(keys + _mix(ids + signed(GOLDEN)))
    return _shift(bits, 64 - UNIFORM_BITS).double().add_(0.5).mul_(2.0**-UNIFORM_BITS)


def _shift(bits: Tensor, count: int) -> Tensor:
    """Logical shift right: torch's `>>` on int64 copies the sign."""
    return (bits >> count).bitwise_and_(2 ** (64 - count) - 1)


def _mix(bits: Tensor) -> Tensor:
    bits = _shift(bits, 30).bitwise_xor_(bits).mul_(signed(MIX_1))
    bits = _shift(bits, 27).bitwise_xor_(bits).mul_(signed(MIX_2))
    return _shift(bits, 31).bitwise_xor_(bits)
