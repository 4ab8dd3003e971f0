"""Which experts tokens went to, beside their keys and values: noted as a step computes them, read as samples end.

What a token's keys and values were computed with, its experts are: where they are shared, moved, parked or computed
again, experts are, too. The newest token of a sample has neither.

Shapes: T tokens of a step, n tokens of samples that end, L layers that are mixtures, K experts for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plait.data.experts import Experts, bytes_of
from plait.data.host_device import uploaded
from plait.generation.link import Link
from plait.generation.pool import KVPool, places_of
from plait.layout.shards import stage_bounds
from plait.models.language_model import LanguageModel
from plait.models.routers import mixtures_of, sizes_of


@dataclass(frozen=True, eq=False)
class NotedExperts:
    """`Routing` of a step: routers choose as they do.

    places_T: int64, of the tokens in the pool; the forward may have copies of them behind
    """

    pool: KVPool
    places_T: Tensor

    def chosen(self, layer: int, own_TK: Tensor) -> Tensor:
        """See `Routing.chosen`."""
        self.pool.write_experts(layer, self.places_T, own_TK[: len(self.places_T)])
        return own_TK


class KeptExperts:
    """What the pools of all stages of a model say of samples.

    Args:
        pool: of this stage.
        link: to the ranks that have other layers.
    """

    def __init__(self, model: LanguageModel, pool: KVPool, link: Link) -> None:
        self._pool, self._link = pool, link
        num_experts, top_k = sizes_of(model.config)
        self._dtype = f"u{bytes_of(num_experts)}"
        mixtures, team = mixtures_of(model.parameters), model.team
        bounds = stage_bounds(model.parameters.num_layers, team.layout.parallelism)
        stages = [[n for n in mixtures if bounds[i] <= n < bounds[i + 1]] for i in range(team.pp.size)]
        self._own = stages[team.pp.index]
        self._columns = [len(stage) * top_k for stage in stages]

    def of(self, samples: Sequence[tuple[Sequence[int], int, int]]) -> list[Experts]:
        """Those of samples; every rank of the instance asks for the same.

        Args:
            samples: of each the blocks, the tokens of prompt and response that were computed, and those of the prompt.
        """
        if not samples:
            return []
        counts = [count for _, count, _ in samples]
        own_nW = torch.zeros(sum(counts), 0, dtype=torch.int16)
        if self._own and own_nW.shape[0]:
            size, device = self._pool.block_tokens, self._pool.experts[self._own[0]].device
            places = np.concatenate([places_of(table, 0, count, size) for table, count, _ in samples])
            places_n = uploaded(places, torch.int64, device)
            own_nW = torch.cat([self._pool.read_experts(layer, places_n) for layer in self._own], dim=1)
        all_nW = self._link.of_all_layers(own_nW, self._columns).cpu().numpy().astype(self._dtype)
        parts, at = [], 0
        for _, count, prompt_tokens in samples:
            parts.append(Experts.of(all_nW[at : at + count], prompt_tokens))
            at += count
        return parts
