"""Rotary positions of training on a GPU, by Triton: queries and keys in one launch, forward and backward.

By torch's operators it is ten launches forward and more backward, each of which reads and writes most of them.
`fused_rows` does the same on a CPU.

Shapes: T tokens, Hq query heads, Hkv key heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.kernels.on_devices import AVAILABLE, are_of_one_kind, power_of_two

TILE, WARPS = 512, 2
"""Numbers of a half that a program takes at a time, and its warps: eight for each thread."""


def serves(device: torch.device) -> bool:
    """Whether there is a kernel for a device."""
    return AVAILABLE and device.type == "cuda"


def takes(*tensors: Tensor) -> bool:
    """Whether the kernel computes with these, of any shapes: all bfloat16, or all float32, on a GPU, none empty."""
    return are_of_one_kind(*tensors) and all(serves(tensor.device) for tensor in tensors)


def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """x · cos + turned(x) · sin of query [1, Hq, T, D] and key [1, Hkv, T, D], where turned puts the negative second
    half before the first; rounded where torch's operators round. In memory the heads of a token are side by side.

    Args:
        cos, sin: [1, T, D], of the same dtype; D is even.
    """
    return _launched(query, key, cos, sin, back=False)


def rotated_backward(grad_query: Tensor, grad_key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients [1, Hq, T, D] and [1, Hkv, T, D] of queries and keys, for any cos and sin; else as `rotated`."""
    return _launched(grad_query, grad_key, cos, sin, back=True)


def _launched(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> tuple[Tensor, Tensor]:
    from plait.kernels import device_rotation_kernels  # imports triton

    tokens, size = query.shape[2:]
    query, key = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key))
    query_out, key_out = _empty(query), _empty(key)
    half = power_of_two(size // 2)
    # Without fusion a product is rounded before it is added, in float32, too.
    device_rotation_kernels.rotate[(tokens,)](
        query, query.stride(2), query.stride(1), query.shape[1], key, key.stride(2), key.stride(1), key.shape[1],
        cos.contiguous(), sin.contiguous(), query_out, key_out,
        D=size, HALF=half, HEADS=max(1, TILE // half), BACK=back, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return query_out, key_out


def _empty(x: Tensor) -> Tensor:
    """[1, H, T, D], in memory [T, H, D], of its own: no view, so that it may be changed in place."""
    _, heads, tokens, size = x.shape
    strides = (tokens * heads * size, size, heads * size, 1)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
