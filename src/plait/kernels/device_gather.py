"""Keys and values of a packed row laid out one sequence behind another on a GPU, and the way back of their gradients,
by Triton: one launch each.

Several sequences begin with what they share, so a token has one place or more. Gradients of the places of a token are
added up in the order of the places, in float32: the same bits each time.

Shapes: T tokens of the row, K places, H key heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.kernels.on_devices import power_of_two

ROWS = 32
"""Places that a program of the gather has."""
AT_A_TIME = 8
"""Places of a token that a program of the fold adds at a time."""


@dataclass(frozen=True)
class GatherTable:
    """Which token each place has, and which places each token has; int32, on one device."""

    token_K: Tensor
    starts_T1: Tensor
    """Where the places of each token begin among `of_tokens_K`, [T + 1]."""
    of_tokens_K: Tensor
    """All places, by token, ascending for each."""


def gathered(key_THD: Tensor, value_THD: Tensor, table: GatherTable) -> tuple[Tensor, Tensor]:
    """Keys and values of all places, contiguous, [K, H, D] each; these have their last numbers one behind another."""
    from plait.kernels import device_gather_kernels  # imports triton

    heads, size = key_THD.shape[1:]
    num_places = len(table.token_K)
    keys, values = (torch.empty(num_places, heads, size, dtype=x.dtype, device=x.device) for x in (key_THD, value_THD))
    assert key_THD.stride(2) == value_THD.stride(2) == 1, "numbers of a head lie one behind another"
    device_gather_kernels.gather[(-(-num_places // ROWS), heads)](
        key_THD, *key_THD.stride()[:2], value_THD, *value_THD.stride()[:2], keys, values, table.token_K, num_places,
        HEADS=heads, D=size, WIDE_D=power_of_two(size), ROWS=ROWS,
    )  # fmt: skip
    return keys, values


def folded(grad_keys_KHD: Tensor, grad_values_KHD: Tensor, table: GatherTable) -> tuple[Tensor, Tensor]:
    """The transpose of `gathered`: for each token the sums over its places, [T, H, D] each, in the dtype of these."""
    from plait.kernels import device_gather_kernels  # imports triton

    grads = [grad.contiguous() for grad in (grad_keys_KHD, grad_values_KHD)]
    heads, size = grad_keys_KHD.shape[1:]
    num_tokens = len(table.starts_T1) - 1
    sums = [torch.empty(num_tokens, heads, size, dtype=grad.dtype, device=grad.device) for grad in grads]
    device_gather_kernels.fold[(num_tokens, heads)](
        *grads, *sums, table.starts_T1, table.of_tokens_K,
        HEADS=heads, D=size, WIDE_D=power_of_two(size), AT_A_TIME=AT_A_TIME, num_warps=1,
    )  # fmt: skip
    return sums[0], sums[1]
