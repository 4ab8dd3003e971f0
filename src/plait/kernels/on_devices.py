"""Whether kernels of GPUs can be compiled here, sizes that they are compiled for, and how many compute at a time."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

AVAILABLE = importlib.util.find_spec("triton") is not None
"""Triton comes with torch for CUDA on Linux."""


def power_of_two(number: int) -> int:
    """That is as large as the number, or the next larger one: few sizes are compiled, and few steps captured."""
    return 1 << max(0, number - 1).bit_length()


def are_of_one_kind(*tensors: Tensor) -> bool:
    """Whether all, of any shapes, are bfloat16, or all float32, and none is empty."""
    dtype = tensors[0].dtype
    return dtype in (torch.bfloat16, torch.float32) and all(one.dtype == dtype and one.numel() for one in tensors)


@functools.cache
def multiprocessors_of(device: torch.device) -> int:
    """How many compute at a time; 1 of what is no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
