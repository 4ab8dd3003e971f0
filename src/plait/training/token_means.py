"""The denominators of a mini-batch's loss, and means over its tokens that micro-batches add to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plait.data.host_device import read
from plait.data.rows import FloatArray, Rows


@dataclass(frozen=True)
class MiniBatchTotals:
    """Denominators of one optimizer step."""

    tokens: int
    """Trained response tokens: those that the mask keeps."""
    sequences: int
    """Samples with at least one trained token; others have no token mean to average."""
    max_response_tokens: int
    """The recipe's response limit, the constant of Dr. GRPO (Liu et al. 2025, arXiv 2503.20783)."""
    pairs: int = 0
    """Groups of two samples that both have a trained token."""

    @classmethod
    def of(cls, rows: Rows, max_response_tokens: int, mask: FloatArray | None = None) -> MiniBatchTotals:
        """Counted in the rows of a mini-batch; `mask` [rows.num_tokens] is 0.0 where a token is not trained."""
        kept = np.ones(rows.num_tokens) if mask is None else mask
        trained = np.array([kept[a:b].sum() for a, b in zip(rows.offsets, rows.offsets[1:], strict=False)])
        pairs = sum(len(members) == 2 and (trained[list(members)] > 0).all() for members in rows.groups.values())
        return cls(int(kept.sum()), int((trained > 0).sum()), max_response_tokens, int(pairs))


class TokenMeans:
    """Means over a mini-batch, of tokens unless told otherwise, gathered micro-batch by micro-batch on the device, in
    float64."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, values: Tensor, count: int | None = None) -> None:
        """Add up what one micro-batch has of a mean.

        Args:
            values: of any shape and float dtype, on the device; their sum is added in float64.
            count: by which the mini-batch's sum is divided; None: its tokens.
        """
        share = values.detach().sum(dtype=torch.float64)
        self._sums[name] = self._sums[name] + share if name in self._sums else share
        self._counts[name] = self._num_tokens if count is None else count

    @property
    def totals(self) -> list[Tensor]:
        """The sums of what was added here, each a scalar [] of float64 on the device: `sums` is given their numbers."""
        return list(self._sums.values())

    def sums(self, totals: Iterable[float]) -> dict[str, tuple[float, int]]:
        """Name → (sum of what was added here, what it is divided by)."""
        return {name: (total, self._counts[name]) for name, total in zip(self._sums, totals, strict=True)}

    @staticmethod
    def of(parts: Iterable[Mapping[str, tuple[float, int]]]) -> dict[str, float]:
        """The means over a mini-batch whose micro-batches were added in several places, from the `sums` of each."""
        totals: dict[str, float] = {}
        counts: dict[str, int] = {}
        for part in parts:
            for name, (total, count) in part.items():
                totals[name] = totals[name] + total if name in totals else total
                counts[name] = count
        return {name: total / max(1, counts[name]) for name, total in totals.items()}

    def result(self) -> dict[str, float]:
        """The means, where all was added here."""
        return self.of([self.sums(map(float, read(self.totals)))])
