"""What enters the products of a module is kept for the backward by tokens: each rank its own, once.

A product saves its input for the gradient of its weights. Where tokens are sharded the input has been gathered from all
ranks; kept as it is, every rank would keep all of it. So the own tokens are kept in its stead, and gathered again when
the backward asks for the first of the products that read them (Korthikanti et al. 2022, arXiv 2205.05198, section
4.2.2). The numbers are the same, so nothing but memory and traffic changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class KeptTokens:
    """The own tokens of an input that was gathered.

    Args:
        own: [1, t, H], kept.
        gather: [1, T, H] of it, on all ranks.
    """

    def __init__(self, own: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
        self.own, self._gather = own, gather
        self._uses = self._left = 0
        self._whole: Tensor | None = None

    def use(self) -> None:
        """Count one more that will ask for all tokens in a backward."""
        self._uses += 1

    def whole(self) -> Tensor:
        """[1, T, H], gathered for the first of the uses and let go with the last."""
        if self._whole is None:
            self._whole, self._left = self._gather(self.own), self._uses
        whole = self._whole
        self._left -= 1
        if not self._left:
            self._whole = None
        return whole


@dataclass(frozen=True)
class _Use:
    kept: KeptTokens
    shape: torch.Size


def keeping(kept: KeptTokens, whole: Tensor) -> Any:
    """A context of forwards in which what would be saved of `whole` [1, T, H], as any view of all its rows, is `kept`.
    Everything else is saved as ever. `whole` must live until it ends. May not be open around activation checkpointing,
    whose own hooks it would hide."""
    begins, numbers = whole.data_ptr(), whole.numel()  # what is saved holds on to `pack`, so it may not hold the row

    def pack(tensor: Tensor) -> Any:
        if tensor.data_ptr() != begins or tensor.numel() != numbers or not tensor.is_contiguous():
            return tensor.detach()  # itself it would hold on to the operation that it is saved for
        kept.use()
        return _Use(kept, tensor.shape)

    def unpack(saved: Any) -> Tensor:
        return saved.kept.whole().view(saved.shape) if isinstance(saved, _Use) else saved

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
