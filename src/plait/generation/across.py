"""Numbers between host and device. On a GPU a step waits for it once, where its tokens are read; nothing else waits.

A plain `torch.tensor(..., device="cuda")` would wait for everything before it: its source is memory that may be paged
out. So uploads come from pinned memory, and the step goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def uploaded(values: Sequence[object], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A tensor of these numbers [N], or rows of numbers [N, M], on the device; without a wait."""
    if torch.device(device).type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=torch.cuda.is_available()).to(device, non_blocking=True)


def downloaded(token_ids_D: Tensor, logprobs_D: Tensor) -> tuple[list[int], list[float]]:
    """What a step has drawn, on the host: the one wait of the step."""
    if token_ids_D.device.type == "cpu":
        return token_ids_D.tolist(), logprobs_D.tolist()
    stacked_2D = torch.stack([token_ids_D.double(), logprobs_D.double()])  # float64 holds every id and every float32
    token_ids, logprobs = stacked_2D.tolist()
    return [int(token_id) for token_id in token_ids], logprobs
