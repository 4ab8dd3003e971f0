"""Weights as the compiled kernels read them: laid out in panels (`kernels.products`), on huge pages; rows alike.

Shapes: I input and O output features.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from plait.kernels import products
from plait.kernels.products import TILE_COLUMNS

ALIGNMENT = 64
"""Bytes: a vector, a line of the cache."""

HUGE_PAGE = 1 << 21
"""Bytes. With weights on huge pages [8, 1536] by [1536, 576] takes 39 µs in place of 45, 32 rows 117 (122)."""

Rows = list[tuple[Tensor, Tensor | None]]
"""Weights [O, I] of one input, and biases [O], one under the other."""


class Panels:
    """Copies of weights in one piece of memory, which may outlive them."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._parts: list[Tensor] = []
        self._state: int | None = None
        """The number of the weights that the memory has; None: not known."""

    @property
    def num_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    def of(self, wanted: Sequence[Rows], state: int | None = None) -> list[Tensor]:
        """Each of these laid out, uint32, in the shape that `panels_of` says.

        Args:
            wanted: of the same shapes in every call.
            state: a number that changes with the weights: what the memory has of them already is not written again.
                None: it may have changed.
        """
        if self._memory is not None and state is not None and state == self._state:
            return self._parts
        shapes = [panels_of(rows) for rows in wanted]
        sizes = [shape[0] * shape[1] * shape[2] for shape in shapes]
        if self._memory is None:  # one after another: what is asked for ahead is the next
            self._memory = aligned((sum(sizes),), torch.uint32)
        pieces = self._memory.split(sizes)
        self._parts = [flat.view(shape) for flat, shape in zip(pieces, shapes, strict=True)]
        for rows, out in zip(wanted, self._parts, strict=True):
            lay_out(rows, out)
        self._state = state
        return self._parts

    def drop(self) -> None:
        """Give the memory back."""
        self._memory, self._parts, self._state = None, [], None


def panels_of(parts: Rows) -> tuple[int, int, int]:
    """The shape of these weights, one under the other, laid out as uint32."""
    weight_OI = parts[0][0]
    num_terms = weight_OI.shape[1] * weight_OI.element_size() // 4
    return products.panels(sum(len(weight) for weight, _ in parts)), 1 + num_terms, TILE_COLUMNS


def lay_out(parts: Rows, out: Tensor) -> None:
    """Write these weights, and biases behind them, to `out` of the shape of `panels_of`."""
    first = 0
    for weight_OI, bias_O in parts:
        bias = np.empty(0, np.float32) if bias_O is None else bias_O.detach().float().numpy()
        terms = weight_OI.detach().contiguous().view(torch.uint32).numpy()
        products.pack(terms, bias, first, out.numpy())
        first += len(weight_OI)


def padded(width: int, dtype: torch.dtype) -> int:
    """Columns of rows with room for panels of so many outputs: an odd number of cache lines, so that a column of 16
    rows does not fall into a few sets of the cache."""
    per_line = ALIGNMENT // torch.empty(0, dtype=dtype).element_size()
    lines = -(-products.panels(width) * TILE_COLUMNS // per_line)
    return (lines | 1) * per_line


def aligned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of this shape that start at a multiple of ALIGNMENT, a large one on huge pages where the system has
    them."""
    item = torch.empty(0, dtype=dtype).element_size()
    count = int(np.prod(shape))
    if count * item >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        # Shared pages, the default, are never huge.
        pages = mmap.mmap(-1, count * item + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel that is built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
        whole, alignment = torch.frombuffer(pages, dtype=torch.uint8), HUGE_PAGE
    else:
        whole, alignment = torch.zeros(count * item + ALIGNMENT, dtype=torch.uint8), ALIGNMENT
    first = -whole.data_ptr() % alignment
    return whole[first : first + count * item].view(dtype).view(shape)
