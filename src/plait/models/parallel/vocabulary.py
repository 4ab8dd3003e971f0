"""A head that is cut by vocabulary: what the ranks of tensor parallelism tell each other to have one softmax.

Shapes: N rows, C rows of one chunk, V vocabulary, W the part of it that this rank has.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from plait.models.parallel.collectives import copied, gathered
from plait.models.parallel.team import Peers


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The token ids whose logits this rank computes.

    Args:
        peers: the ranks of tensor parallelism.
        bounds: first token id of each, and the size of the vocabulary.
    """

    peers: Peers
    bounds: tuple[int, ...]

    @property
    def start(self) -> int:
        return self.bounds[self.peers.index]

    @property
    def stop(self) -> int:
        return self.bounds[self.peers.index + 1]

    def most(self, top_C: Tensor) -> Tensor:
        """The largest over all ranks; in place."""
        return self.peers.all_reduce(top_C, "max")

    def sums(self, *parts_C: Tensor) -> tuple[Tensor, ...]:
        """The sum of each over all ranks."""
        return self.peers.all_reduce(torch.stack(parts_C)).unbind()

    def places(self, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        """Columns [C] of the targets among this rank's logits (any where it has not), and whether it has them [C]."""
        has_C = (targets_C >= self.start) & (targets_C < self.stop)
        return (targets_C - self.start).clamp(0, self.stop - self.start - 1), has_C

    def shared(self, hidden_NH: Tensor) -> Tensor:
        """The hidden states, equal on all ranks, for a head of which each rank has a part."""
        return copied(hidden_NH, self.peers)

    def gather(self, logits_NW: Tensor) -> Tensor:
        """All logits [N, V], on every rank; differentiable."""
        return gathered(logits_NW, self.peers, tuple(pairwise(self.bounds)))
