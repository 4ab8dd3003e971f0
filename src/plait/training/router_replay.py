"""Tokens go to the experts that they went to when they were drawn; weights are of the present router (R3: Ma et al.
2025, arXiv 2510.11370, equations 7 and 8).

Shapes: T tokens of a packed row, L layers that are mixtures, K experts for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from plait.data.host_device import uploaded
from plait.data.packed import PackedBatch
from plait.data.token_experts import Drawn, TokenExperts, token_experts
from plait.errors import RunError
from plait.models.routers import mixtures_of, sizes_of


@dataclass(frozen=True, eq=False)
class RouterReplay:
    """`Routing` of one forward.

    mixtures:    layers of the whole model that are mixtures, ascending
    numbers_TLK: those to go to; any where `known_T1` says no, and a router chooses by itself
    counted_T:   whose choices are counted
    """

    mixtures: Sequence[int]
    numbers_TLK: Tensor
    known_T1: Tensor
    counted_T: Tensor
    used: dict[int, Tensor] = field(default_factory=dict)
    """Layer → where its tokens went, [T, K] int64."""
    differing: dict[int, Tensor] = field(default_factory=dict)
    """Layer → how many of the counted tokens the router itself would have sent to others, a scalar."""

    @classmethod
    def of(cls, experts: TokenExperts, mixtures: Sequence[int], device: torch.device) -> Self:
        """That of a packed row whose tokens lie on a device."""
        numbers = experts.numbers_TLK
        if numbers.itemsize > 1:  # torch has few operators for uint16
            numbers = numbers.astype(np.int16)
        known_T, counted_T = uploaded(np.stack([experts.known_T, experts.counted_T]), torch.bool, device)
        dtype = torch.uint8 if numbers.itemsize == 1 else torch.int16
        return cls(mixtures, uploaded(numbers, dtype, device), known_T[:, None], counted_T)

    def chosen(self, layer: int, own_TK: Tensor) -> Tensor:
        """See `Routing.chosen`."""
        told_TK = self.numbers_TLK[:, self.mixtures.index(layer)].long()
        used_TK = torch.where(self.known_T1, told_TK, own_TK)
        self.used[layer] = used_TK
        differs_T = (used_TK.sort(-1).values != own_TK.sort(-1).values).any(-1)
        self.differing[layer] = (differs_T & self.counted_T).sum()
        return used_TK

    def counts(self) -> Tensor:
        """[2] int64: choices that the routers of this stage would have made otherwise, and choices that were told."""
        zero = self.known_T1.new_zeros((), dtype=torch.int64)
        differing = sum(self.differing.values(), start=zero)
        return torch.stack([differing, self.counted_T.sum() * len(self.differing)])


def replay_of(model: Any, batch: PackedBatch, groups: Sequence[Sequence[Drawn]]) -> RouterReplay | None:
    """That of a packed row through a model, perhaps a part of one; None: no sample says where its tokens went.

    Args:
        groups: the samples of each group of the row.

    Raises:
        RunError: they are of a model with other mixtures.
    """
    if all(sample.experts is None for samples in groups for sample in samples):
        return None
    mixtures, (num_experts, top_k) = mixtures_of(model.parameters), sizes_of(model.config)
    try:
        experts = token_experts(batch, groups, (len(mixtures), top_k, num_experts))
    except ValueError as error:
        raise RunError(
            f"`sampling.router_replay`: samples were drawn by a model with other mixtures of experts than "
            f"`{model.config.name_or_path}`, which reads them: {error}"
        ) from error
    return None if experts is None else RouterReplay.of(experts, mixtures, batch.token_ids_T.device)
