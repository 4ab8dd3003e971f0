"""What a device and its host's memory send each other, as weights and optimizer state that leave do."""

from __future__ import annotations

import torch

from plait.cost.measured.stopwatch import seconds_of
from plait.cost.profile import LinkRecord

SIZES = (1 << 12, 1 << 26)
"""Bytes of a copy that is all latency, and of one that is none."""


def measure_host(device: str) -> LinkRecord:
    """Copies between a device of this kind and pinned memory, in the slower direction."""
    least, most = (_copy_s(device, size) for size in SIZES)
    return LinkRecord(bytes_per_s=SIZES[1] / max(most - least, 1e-9), latency_s=least)


def _copy_s(device: str, num_bytes: int) -> float:
    """Seconds of a copy of so many bytes, there or back."""
    here = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=device == "cuda")
    there = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    ways = ((here, there), (there, here))
    return max(seconds_of(lambda to=to, of=of: to.copy_(of), device) for to, of in ways)
