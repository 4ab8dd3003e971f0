"""Whether kernels of GPUs can be compiled here, and sizes that they are compiled for."""

from __future__ import annotations

import importlib.util

AVAILABLE = importlib.util.find_spec("triton") is not None
"""Triton comes with torch for CUDA on Linux."""


def power_of_two(number: int) -> int:
    """That is as large as the number, or the next larger one: few sizes are compiled, and few steps captured."""
    return 1 << max(0, number - 1).bit_length()
