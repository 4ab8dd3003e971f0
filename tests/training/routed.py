"""Samples that say where their tokens went, and routers that send them there, with nothing of plait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.data.experts import Experts
from plait.data.records import Sample
from plait.data.rows import Rows

EXPERTS, TOP_K = 4, 2


def with_experts(rows: Rows, layers: int = 2, *, experts: int = EXPERTS, top_k: int = TOP_K, seed: int = 5) -> Rows:
    """The rows, drawn from routers that chose at random; the root that all prompts begin with went to the same."""
    rng = np.random.default_rng(seed)

    def chosen(tokens: int) -> np.ndarray:
        each = [[rng.permutation(experts)[:top_k] for _ in range(layers)] for _ in range(tokens)]
        return np.array(each, np.uint8).reshape(tokens, layers * top_k)

    root = chosen(rows.root_tokens).tobytes()
    prompts = {s.prompt.uid: root + chosen(len(s.prompt.token_ids) - rows.root_tokens).tobytes() for s in rows.samples}
    samples = [
        replace(s, experts=Experts(prompts[s.prompt.uid], chosen(max(0, s.num_tokens - 1)).tobytes()))
        for s in rows.samples
    ]
    return replace(rows, samples=tuple(samples))


def told(sample: Sample, layers: int = 2, *, top_k: int = TOP_K) -> Tensor:
    """[tokens of prompt and response that say it, layers, K] int64."""
    assert sample.experts is not None
    flat = np.frombuffer(sample.experts.prompt + sample.experts.response, np.uint8)
    return torch.from_numpy(flat.reshape(-1, layers, top_k).astype(np.int64))


class Told(torch.nn.Module):
    """A family's router, by its formula, that goes to the experts of `told_TK`, and behind them to its own."""

    told_TK: Tensor

    def __init__(self, router: Any, family: str) -> None:
        super().__init__()
        self.router, self.family = router, family

    def forward(self, hidden: Tensor) -> Any:
        hidden_TH = hidden.reshape(-1, hidden.shape[-1])
        bias = getattr(self.router, "bias", None)
        logits_TE = torch.nn.functional.linear(hidden_TH, self.router.weight, bias)
        own_TK = logits_TE.topk(TOP_K).indices
        used_TK = torch.cat([self.told_TK, own_TK[len(self.told_TK) :]])
        if self.family == "gpt_oss":  # softmax over the chosen ones
            return logits_TE, logits_TE.gather(1, used_TK).softmax(-1), used_TK
        probs_TK = logits_TE.softmax(-1).gather(1, used_TK)
        return logits_TE, probs_TK / probs_TK.sum(-1, keepdim=True), used_TK


def routed_by(module: Any, family: str) -> list[Told]:
    """Routers of a module of Transformers from now on, in the order of layers."""
    routers = []
    for layer in module.model.layers:
        name = "router" if family == "gpt_oss" else "gate"
        routers.append(Told(getattr(layer.mlp, name), family))
        setattr(layer.mlp, name, routers[-1])
    return routers
