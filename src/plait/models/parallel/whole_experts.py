"""Expert parallelism within tensor parallelism: a rank has some of a mixture's experts, whole.

Hidden states are equal on all ranks of tensor parallelism. Each rank computes the experts that it has, for the tokens
that go to them, and the sum behind the experts, which stands there where these are cut by columns too, adds what ranks
have computed. Which parameters are divided between experts is Transformers' to say (its plan for expert parallelism);
whether they are, the widths alone (`layout.decoder.experts_stay_whole`).

    grouped_gemm         a parameter with a part of each expert: a rank has those of its experts
    ep_dispatch_experts  the module that has them: f on the hidden states and routing weights, g behind

Shapes: T tokens, K experts for each, H hidden size, P pairs of a token and an expert that this rank has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.layout.decoder import experts_stay_whole
from plait.models.shape import ModelShape, config_fields

DISPATCHES, DIVIDED = "ep_dispatch_experts", "grouped_gemm"


def whole_experts(module: Any) -> Mapping[str, str]:
    """Style of modules and parameters, by names with `*` for numbers, of experts that ranks have whole; empty where
    there are none, or they are too wide."""
    stated: Mapping[str, str] = getattr(module, "ep_plan", None) or {}
    if DISPATCHES not in stated.values():
        return {}
    shape = ModelShape.from_config(config_fields(module.config.get_text_config()))
    if not experts_stay_whole(shape.expert_intermediate, shape.hidden):
        return {}
    return {name: style for name, style in stated.items() if style in (DISPATCHES, DIVIDED)}


def keep_experts(layer: Any, first: int, stop: int) -> None:
    """Have a module compute the experts [first, stop) of the mixture, whose parameters are this rank's by now."""
    layer.num_experts = stop - first
    layer._is_expert_parallel = next(layer.parameters()).is_cuda
    layer.forward = OwnExperts(layer, first, stop)


@dataclass(eq=False)
class OwnExperts:
    """`forward` of a module of experts of which the rank has [first, stop): what they add to each token.

    The family's own code computes pairs as if each were a token with one expert, so nothing is computed, or kept for
    the backward, of those that other ranks have. How many there are is asked of the device. Where a GPU generates or
    scores, steps are launched ahead and replayed, so nothing may be asked: there all pairs go in, those of others as
    ones of an expert behind the last, without weight, which grouped products pass over (Transformers' `AllReduceEP`).
    """

    layer: Any
    first: int
    stop: int

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        hidden_TH, chosen_TK, weights_TK = (*args, *kwargs.values())
        if self.layer._is_expert_parallel and _are_grouped(self.layer) and not torch.is_grad_enabled():
            return self.by_masks(hidden_TH, chosen_TK, weights_TK)
        return self.by_pairs(hidden_TH, chosen_TK, weights_TK)

    def by_pairs(self, hidden_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """[T, H] of int64 numbers of experts and their weights. What a token's experts add is summed up in their order,
        in float32 at least, and one at a time, so that it is the same each time on a GPU too."""
        own_KT = ((chosen_TK >= self.first) & (chosen_TK < self.stop)).T
        counts = own_KT.sum(1).tolist()
        slots_P, tokens_P = own_KT.nonzero(as_tuple=True)
        if not sum(counts):  # other ranks wait for gradients of what goes in, and kernels want rows: one, not added
            slots_P = tokens_P = chosen_TK.new_zeros(1)
        numbers_P = (chosen_TK[tokens_P, slots_P] - self.first).clamp(0, self.stop - self.first - 1)
        weights_P = weights_TK[tokens_P, slots_P]
        rows_PH = self._computed(hidden_TH[tokens_P], numbers_P[:, None], weights_P[:, None])
        dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
        total_TH = torch.zeros_like(hidden_TH, dtype=dtype)
        places = tokens_P[: sum(counts)].split(counts), rows_PH[: sum(counts)].split(counts)
        for tokens_p, rows_pH in zip(*places, strict=True):
            total_TH.index_put_((tokens_p,), rows_pH.to(dtype), accumulate=True)  # keeps no rows, as index_add would
        return total_TH.to(hidden_TH.dtype)

    def by_masks(self, hidden_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The same without a number that depends on what is chosen; of grouped products alone."""
        others_TK = (chosen_TK < self.first) | (chosen_TK >= self.stop)
        numbers_TK = torch.where(others_TK, self.stop - self.first, chosen_TK - self.first)
        return self._computed(hidden_TH, numbers_TK, weights_TK.masked_fill(others_TK, 0))

    def _computed(self, hidden: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        return type(self.layer).forward(self.layer, hidden, numbers, weights)


def _are_grouped(layer: Any) -> bool:
    """Whether products of all experts are made at once. Some families (Step-3.7) have a loop alone, and no
    configuration that says so."""
    config = getattr(layer, "config", None)
    return config is not None and config._experts_implementation != "eager"
