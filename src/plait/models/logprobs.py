"""Log-probs and entropies of the sampling distribution softmax(logits / temperature), in chunks over the head.

Shapes: R rows (response tokens), H hidden size, V vocabulary, C rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ROWS = 512


def chunked_logprobs(
    head: Callable[[Tensor], Tensor], hidden_RH: Tensor, targets_R: Tensor, temperature: float, rows: int = CHUNK_ROWS
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropies, both [R], in float32 (float64 for a float64 model)."""
    assert temperature > 0, f"temperature must be positive, got {temperature}"

    def chunk(hidden_CH: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        logits_CV = head(hidden_CH)
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)) / temperature
        logp_CV = logits_CV.log_softmax(-1)
        return logp_CV.gather(1, targets_C[:, None])[:, 0], -(logp_CV.exp() * logp_CV).sum(-1)

    parts = []
    for hidden_CH, targets_C in zip(hidden_RH.split(rows), targets_R.split(rows), strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(chunk, hidden_CH, targets_C, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(chunk(hidden_CH, targets_C))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
