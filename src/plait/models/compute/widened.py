"""Products of bfloat16 on CPUs without instructions for them, of widened numbers.

On CPUs without AVX-512 torch's bfloat16 products run at a tenth of float32's. There numbers of bfloat16 are widened,
multiplied and summed in float32, and rounded once at the end, which is what a CPU with instructions for them does.
On one core of an AMD EPYC with AVX2, in GFLOP/s, [512, 576] by [1536, 576]ᵀ:

    float32 81      bfloat16 by torch 8.5, by widened numbers 71

Shapes: N rows, I input and O output features; B products of a batch, N rows by M columns, K what they are summed over.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from plait import kept_memory

WIDENED_WEIGHTS = 1 << 19
"""Numbers of a weight that are widened at a time: 2 MiB."""


def _widens() -> bool:
    """oneDNN refuses bfloat16 where neither AVX-512 nor instructions for the conversion are."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(2, 2, dtype=torch.bfloat16), 1)
    except RuntimeError:
        return True
    except AttributeError:
        return False  # this torch has no oneDNN
    return False


kept_memory.bound()  # `_widens` computes, perhaps for the first time in this process
WIDENS = _widens()
"""Whether products of bfloat16 are computed of widened numbers on this CPU."""


def takes(tensor: Tensor) -> bool:
    """Whether products of this tensor, of any shape, are computed here."""
    return WIDENS and tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu"


def _by_onednn(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], "")


def product(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x · weightᵀ + bias [..., O]; the weight may be a packed one in float32."""
    wide_NI, wide_O = x_NI.float(), None if bias_O is None else bias_O.float()
    if weight_OI.dtype == torch.float32:
        return _by_onednn(wide_NI, weight_OI, wide_O).bfloat16()
    out_NO = x_NI.new_empty(*x_NI.shape[:-1], len(weight_OI))
    for at in _pieces(weight_OI):
        out_NO[..., at] = _by_onednn(wide_NI, weight_OI[at].float(), None if wide_O is None else wide_O[at])
    return out_NO


def input_gradient(grad_NO: Tensor, weight_OI: Tensor) -> Tensor:
    """grad · weight [N, I]."""
    wide_NI = grad_NO.new_zeros(len(grad_NO), weight_OI.shape[1], dtype=torch.float32)
    for at in _pieces(weight_OI):
        wide_NI.addmm_(grad_NO[:, at].float(), weight_OI[at].float())
    return wide_NI.bfloat16()


def weight_gradient(grad_NO: Tensor, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """gradᵀ · x [O, I]."""
    wide_NI, out_OI = x_NI.float(), torch.empty_like(weight_OI)
    for at in _pieces(weight_OI):
        out_OI[at] = grad_NO[:, at].float().t() @ wide_NI
    return out_OI


def _pieces(weight_OI: Tensor) -> Iterator[slice]:
    """Output features of a few at a time: their widened weights stay in the cache."""
    step = max(1, WIDENED_WEIGHTS // weight_OI.shape[1])
    return (slice(start, start + step) for start in range(0, len(weight_OI), step))


def batched_product(left_BNK: Tensor, right_BKM: Tensor) -> Tensor:
    """left · right [B, N, M] in their dtype, on any device; without gradients."""
    if takes(left_BNK):
        return torch.bmm(left_BNK.float(), right_BKM.float()).bfloat16()
    return torch.bmm(left_BNK, right_BKM)


def scaled_batched_product(left_BNK: Tensor, right_BKM: Tensor, scale: float) -> Tensor:
    """scale · left · right [B, N, M] in their dtype, rounded once, on any device; without gradients."""
    if takes(left_BNK):
        return torch.bmm(left_BNK.float(), right_BKM.float()).mul_(scale).bfloat16()
    out_BNM = left_BNK.new_empty(*left_BNK.shape[:2], right_BKM.shape[2])
    return torch.baddbmm(out_BNM, left_BNK, right_BKM, beta=0, alpha=scale)
