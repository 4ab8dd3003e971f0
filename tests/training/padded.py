"""The plain way, as an oracle: one right-padded batch through Transformers' eager model, masks and 2-D sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.data.rows import FloatArray, Rows


@dataclass
class Padded:
    """Shapes: N samples in the order of the rows, L response places of the longest one."""

    response_NL: Tensor
    """1.0 at real response tokens."""
    mask_NL: Tensor
    """1.0 at trained ones."""
    hidden_NLH: Tensor
    """Hidden states that predict each response token."""
    last_NH: Tensor
    """Hidden state of each sample's last token."""
    tokens_NL: Tensor

    def logprobs(self, module: Any, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [N, L], from full logits; 0 outside the responses."""
        logp_NLV = (module.lm_head(self.hidden_NLH) / temperature).log_softmax(-1)
        taken_NL = logp_NLV.gather(-1, self.tokens_NL[..., None])[..., 0]
        entropies_NL = -(logp_NLV.exp() * logp_NLV).sum(-1)
        return taken_NL * self.response_NL, entropies_NL * self.response_NL

    def column(self, values: FloatArray) -> Tensor:
        """[N, L] of a TOKEN column."""
        out_NL = torch.zeros_like(self.response_NL)
        out_NL[self.response_NL > 0] = torch.as_tensor(values, dtype=out_NL.dtype)
        return out_NL


def padded(module: Any, rows: Rows, mask: FloatArray | None = None) -> Padded:
    """Run the decoder `module` (float64) over the rows, differentiably."""
    ids = [[*s.prompt.token_ids, *s.token_ids] for s in rows.samples]
    width = max(map(len, ids))
    ids_NT = torch.tensor([[*row, *[0] * (width - len(row))] for row in ids])
    real_NT = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    hidden_NTH = module(input_ids=ids_NT, attention_mask=real_NT, use_cache=False).last_hidden_state
    longest = max(len(s.token_ids) for s in rows.samples)
    prompts = torch.tensor([len(s.prompt.token_ids) for s in rows.samples])
    lengths = torch.tensor([len(s.token_ids) for s in rows.samples])
    places_NL = (prompts[:, None] + torch.arange(longest)).clamp(max=width - 1)
    every = torch.arange(len(rows))
    response_NL = (torch.arange(longest) < lengths[:, None]).to(torch.float64)
    out = Padded(
        response_NL,
        response_NL,
        hidden_NTH[every[:, None], places_NL - 1],
        hidden_NTH[every, prompts + lengths - 1],
        ids_NT[every[:, None], places_NL],
    )
    if mask is not None:
        out.mask_NL = out.column(mask)
    return out


def gradients_of(module: Any, names: Sequence[str]) -> dict[str, Tensor]:
    """Name → gradient, zeros where none arrived."""
    found = {name: module.get_parameter(name) for name in names}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in found.items()}
