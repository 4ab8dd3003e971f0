"""The unpacked, unshared computation by Transformers' own eager forward: the oracle of the packed one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.training.exact import ExactFloat64

Groups = Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]]

RAGGED: Groups = (
    ([5, 6, 7, 8, 9, 10, 11], [[12, 13, 14, 15, 16, 17, 18, 19], [20, 21, 22], [23]]),
    ([30], [[31, 32, 33, 34, 35, 36]]),
    ([40, 41, 42], [[43, 44], [45, 46, 47, 48]]),
)


def wide_softmax() -> ExactFloat64:
    """Most eager forwards take norms and the softmax in float32 whatever the model's dtype; inside, a float64 one stays
    as wide."""
    return ExactFloat64()


def eager_logprobs(module: Any, groups: Groups, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of all response tokens, each sample a forward of its own over full logits."""
    logprobs, entropies = [], []
    with wide_softmax():
        for prompt, responses in groups:
            for response in responses:
                ids = torch.tensor([[*prompt, *response]])
                logits_TV = module(input_ids=ids, use_cache=False).logits[0] / temperature
                logp_RV = logits_TV.log_softmax(-1)[len(prompt) - 1 : -1]
                logprobs.append(logp_RV.gather(1, torch.tensor(response)[:, None])[:, 0])
                entropies.append(-(logp_RV.exp() * logp_RV).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def gradients(module: Any, logprobs: Tensor, entropies: Tensor) -> dict[str, Tensor]:
    """Parameter gradients of a fixed loss that weighs every log-prob and entropy differently."""
    places = torch.arange(len(logprobs), dtype=logprobs.dtype, device=logprobs.device)
    loss = (torch.cos(places) * logprobs + 0.3 * torch.sin(places) * entropies).sum()
    module.zero_grad(set_to_none=True)
    loss.backward()
    return {name: param.grad.clone() for name, param in module.named_parameters() if param.grad is not None}


def largest_error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest difference of two sets of gradients, in units of 1 + the largest entry of the tensor."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - g).abs().max() / (1 + g.abs().max())) for n, g in theirs.items())
