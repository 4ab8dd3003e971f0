"""Bytes that a role's parameters take, for the memory estimate of a dry run. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}

RUN_ELEMENTS = 1 << 23
"""Elements of divided gradients that are reduced at once: small parameters wait for their neighbours, large ones are
cut."""

MOST_ROOMS = 16
"""As many as `num_rooms` ever gives: 512 MiB in float32."""


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes per parameter, a tied parameter counted once."""

    weights: int
    """Working weights, in the compute dtype."""
    masters: int
    """0 where masters and working weights have one dtype: they are then the same buffer."""
    moments: int
    """AdamW's two."""
    gradients: int
    """The accumulation buffer. The gradient of a single parameter in the compute dtype lives beside it for a moment."""
    average: int = 0
    """The slow average that the reference is made from, where it follows."""

    @property
    def total(self) -> int:
        return self.weights + self.masters + self.moments + self.gradients + self.average


def parameter_bytes(dtype: str, *, trained: bool, followed: bool = False) -> ParameterBytes:
    """Bytes per parameter of one role that computes in `dtype` ("bfloat16", "float32" or "float64").

    A trained role in bfloat16 takes 2 + 4 + 8 + 4 = 18, in float32 4 + 0 + 8 + 4 = 16; a frozen one its weights alone.
    One that the reference follows takes 4 more.
    """
    compute = BYTES[dtype]
    if not trained:
        return ParameterBytes(compute, 0, 0, 0)
    master = max(compute, BYTES["float32"])
    masters = 0 if compute == master else master
    return ParameterBytes(compute, masters, 2 * master, master, master if followed else 0)


def num_rooms(largest: int) -> int:
    """Runs of divided gradients that are summed at a time, on a rank whose largest trained parameter of a layer has so
    many elements.

    Its gradient comes at once: all of it is on its way while the next is computed, and one more run is filled. With
    fewer rooms the backward waits for messages. What is behind that (`MOST_ROOMS`) is too much memory for what it
    hides.
    """
    return min(MOST_ROOMS, 1 + max(1, -(-largest // RUN_ELEMENTS)))


def room_bytes(elements: int, largest: int, dtype: str) -> int:
    """Bytes of the runs of divided gradients that are summed at a time, on a rank with so many elements of weights,
    `largest` of them in the largest parameter of a layer."""
    return num_rooms(largest) * min(RUN_ELEMENTS, elements) * parameter_bytes(dtype, trained=True).gradients
