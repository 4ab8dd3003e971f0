"""Numbers between host and device. A GPU is waited for where a step of generation reads its tokens, and where a
mini-batch of training ends; nothing else waits.

A plain `torch.tensor(..., device="cuda")` would wait for everything before it: its source is memory that may be paged
out. So uploads come from pinned memory, and the host goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

HostTokens = tuple[list[int], list[float]]
"""Token ids [D] and log-probs [D] on the host."""
Bits = np.ndarray[Any, np.dtype[np.uint8]]
"""Bytes [D, W] on the host."""


def uploaded(values: Any, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A tensor of these numbers on the device; without a wait.

    Args:
        values: of the host: numbers [N], or rows of numbers [N, M]; a NumPy array or a tensor of any shape, which on a
            CPU is itself where it has the dtype.
    """
    host = torch.as_tensor(values, dtype=dtype)
    if torch.device(device).type == "cpu":
        return host
    return (host.pin_memory() if torch.cuda.is_available() else host).to(device, non_blocking=True)


def computes_behind(device: torch.device) -> bool:
    """Whether the device computes while the host goes on, so that results are there later than the calls return."""
    return device.type != "cpu"


def downloading(token_ids_D: Tensor, logprobs_D: Tensor) -> Callable[[], HostTokens]:
    """Begin to bring to the host what a step draws.

    Returns:
        Waits for it, the one wait of the step, and returns it. What the device was asked for since is not waited for.
    """
    if not computes_behind(token_ids_D.device):
        drawn = token_ids_D.tolist(), logprobs_D.tolist()
        return lambda: drawn
    stacked_2D = torch.stack([token_ids_D.double(), logprobs_D.double()])  # float64 holds every id and every float32
    there = _coming(stacked_2D)
    return lambda: numbers_of(there())


def downloading_bits(bits_DW: Tensor) -> Callable[[], Bits]:
    """Begin to bring bytes [D, W] uint8 to the host, as `downloading` does tokens.

    Returns:
        Waits for them and returns them.
    """
    if not computes_behind(bits_DW.device):
        return bits_DW.numpy
    there = _coming(bits_DW)
    return lambda: there().numpy()


def stored(tensor: Tensor) -> Tensor:
    """A copy in pinned memory of the host of what a device has, of any shape and dtype; without a wait. Its numbers are
    there for what the device is asked for from now on (`Tensor.to`), not for the host."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def _coming(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor of a device to the host; waits for it alone and returns it there."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    there = torch.cuda.Event()
    there.record()

    def wait() -> Tensor:
        there.synchronize()
        return host

    return wait


@dataclass(frozen=True)
class Moment:
    """When a device had computed all that it was asked for before."""

    host_s: float
    event: torch.cuda.Event | None = None
    """What a device that computes behind reached it by."""


def moment(device: torch.device) -> Moment:
    """That of now; without a wait."""
    if not computes_behind(device):
        return Moment(time.perf_counter())
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return Moment(time.perf_counter(), event)


def seconds_between(moments: Sequence[Moment]) -> list[float]:
    """[N - 1]: from each of N moments of a device to the next one; the last one is waited for, if it is to come."""
    if moments and (last := moments[-1].event) is not None:
        last.synchronize()
    return [_seconds(first, then) for first, then in pairwise(moments)]


def _seconds(first: Moment, then: Moment) -> float:
    if first.event is None or then.event is None:
        return then.host_s - first.host_s
    return first.event.elapsed_time(then.event) / 1e3  # milliseconds of the device's own clock


def numbers_of(drawn_2D: Tensor) -> HostTokens:
    """The numbers of token ids and log-probs, float64 [2, D] on the host."""
    token_ids, logprobs = drawn_2D.tolist()
    return list(map(int, token_ids)), logprobs


def read(tensors: Sequence[Tensor]) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
    """The numbers of tensors of any shapes and dtypes, as float64 on the host: one wait for all of one device.

    Integers are exact up to 2**53. Tensors of the host may be among those of a device, which is the first one's that
    has one.
    """
    if not tensors:
        return []
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)
    wide = [tensor.detach().reshape(-1).double() for tensor in tensors]
    flat = torch.cat([numbers if numbers.device == device else numbers.to(device) for numbers in wide]).cpu().numpy()
    parts = np.split(flat, np.cumsum([tensor.numel() for tensor in tensors])[:-1])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
