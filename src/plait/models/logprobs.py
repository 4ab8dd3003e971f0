"""Log-probs and entropies of the sampling distribution softmax(logits / temperature), in chunks over the head.

With a vocabulary of 49,152 to 262,144 the logits of a batch are its largest tensor by far, so they exist for one
chunk of rows at a time: the forward keeps the log-sum-exp of each row only, and the backward computes a chunk's
logits again.

    log π(y) = z_y − lse(z)          ∂ log π(y) / ∂z_v = [v = y] − p_v
    H = lse(z) − Σ_v p_v z_v         ∂ H / ∂z_v = −p_v (log p_v + H)            z = logits / temperature

Shapes: R rows (response tokens), C rows of one chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.models.head import Head

CHUNK_ROWS = 512


def chunked_logprobs(
    head: Head, hidden_RH: Tensor, targets_R: Tensor, temperature: float, rows: int = CHUNK_ROWS
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropies under softmax(head(hidden) / temperature).

    Args:
        hidden_RH: compute dtype; may require grad.
        targets_R: int64 token ids.
        rows: of one chunk; changes the memory, and the values only up to the order of a matrix product.

    Returns:
        (log-probs [R], entropies [R]) in float32, float64 for a float64 model; once differentiable with respect to
        the hidden states and the head's parameters.
    """
    assert temperature > 0, f"temperature must be positive, got {temperature}"
    assert rows > 0, f"a chunk needs rows, got {rows}"
    return _ChunkedLogprobs.apply(head, rows, temperature, targets_R, hidden_RH, *head.params)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, head: Head, rows: int, temperature: float, targets_R: Tensor, hidden_RH: Tensor, *params: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden_RH.dtype, torch.float32)
        logprobs_R, entropies_R, lse_R = hidden_RH.new_empty((3, len(hidden_RH)), dtype=wide).unbind()
        for start in range(0, len(hidden_RH), rows):
            at = slice(start, start + rows)
            logits_CV = _scaled_logits(head, hidden_RH[at], temperature)
            lse_R[at] = logits_CV.logsumexp(-1)
            logprobs_R[at] = logits_CV.gather(1, targets_R[at, None])[:, 0] - lse_R[at]
            probs_CV = torch.exp(logits_CV - lse_R[at, None])
            entropies_R[at] = lse_R[at] - probs_CV.mul_(logits_CV).sum(-1)
        ctx.head, ctx.rows, ctx.temperature = head, rows, temperature
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(targets_R, hidden_RH, lse_R, entropies_R, *params)
        return logprobs_R, entropies_R

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs_R: Tensor | None, grad_entropies_R: Tensor | None) -> tuple[Any, ...]:
        targets_R, hidden_RH, lse_R, entropies_R, *params = ctx.saved_tensors
        needed = ctx.needs_input_grad[4:]
        if grad_logprobs_R is None and grad_entropies_R is None:
            return (None,) * (4 + len(needed))
        chunk_grads = _linear_grads if ctx.head.linear else _family_grads
        hidden_grads: list[Tensor] = []
        sums: list[Tensor | None] = [None] * len(params)
        num_chunks = -(-len(hidden_RH) // ctx.rows)
        for start in range(0, len(hidden_RH), ctx.rows):
            at = slice(start, start + ctx.rows)
            logits_grad = _LogitsGrad(
                targets_R[at],
                lse_R[at],
                entropies_R[at],
                None if grad_logprobs_R is None else grad_logprobs_R[at],
                None if grad_entropies_R is None else grad_entropies_R[at],
                ctx.temperature,
            )
            hidden_grad, *param_grads = chunk_grads(ctx.head, hidden_RH[at], params, needed, logits_grad)
            if hidden_grad is not None:
                hidden_grads.append(hidden_grad)
            for index, grad in enumerate(param_grads):
                sums[index] = _accumulate(sums[index], grad, num_chunks)
        param_sums = [None if total is None else total.to(p.dtype) for total, p in zip(sums, params, strict=True)]
        return None, None, None, None, torch.cat(hidden_grads) if hidden_grads else None, *param_sums


@dataclass(frozen=True)
class _LogitsGrad:
    """Turns the scaled logits of one chunk into the gradient of the unscaled ones."""

    targets_C: Tensor
    lse_C: Tensor
    entropies_C: Tensor
    grad_logprobs_C: Tensor | None
    grad_entropies_C: Tensor | None
    temperature: float

    def __call__(self, logits_CV: Tensor) -> Tensor:
        """[C, V] → [C, V]; the argument is overwritten."""
        logp_CV = logits_CV.sub_(self.lse_C[:, None])
        grad_CV = torch.exp(logp_CV)
        if self.grad_entropies_C is not None:
            factor_CV = logp_CV.add_(self.entropies_C[:, None]).mul_(self.grad_entropies_C[:, None])
            if self.grad_logprobs_C is not None:
                factor_CV.add_(self.grad_logprobs_C[:, None])
            grad_CV.mul_(factor_CV).neg_()
        else:
            assert self.grad_logprobs_C is not None, "one of the two gradients is there"
            grad_CV.mul_(-self.grad_logprobs_C[:, None])
        if self.grad_logprobs_C is not None:
            grad_CV.scatter_add_(1, self.targets_C[:, None], self.grad_logprobs_C[:, None])
        return grad_CV.div_(self.temperature)


def _scaled_logits(head: Head, hidden_CH: Tensor, temperature: float) -> Tensor:
    logits_CV = head(hidden_CH)
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    return logits_CV.to(wide) if temperature == 1.0 else logits_CV.to(wide) / temperature


def _linear_grads(
    head: Head, hidden_CH: Tensor, params: Sequence[Tensor], needed: Sequence[bool], logits_grad: _LogitsGrad
) -> list[Tensor | None]:
    """Gradients of the hidden states and of (weight [V, H], bias [V])."""
    grad_CV = logits_grad(_scaled_logits(head, hidden_CH, logits_grad.temperature))
    narrow_CV = grad_CV.to(hidden_CH.dtype)
    grads: list[Tensor | None] = [narrow_CV @ params[0] if needed[0] else None]
    grads.append(narrow_CV.t() @ hidden_CH if needed[1] else None)
    if len(params) > 1:
        grads.append(grad_CV.sum(0) if needed[2] else None)
    return grads


def _family_grads(
    head: Head, hidden_CH: Tensor, params: Sequence[Tensor], needed: Sequence[bool], logits_grad: _LogitsGrad
) -> list[Tensor | None]:
    """The same through the family's own head, by automatic differentiation of one chunk."""
    hidden_CH = hidden_CH.detach().requires_grad_(needed[0])
    with torch.enable_grad():
        logits_CV = head.family(hidden_CH)
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    grad_CV = logits_grad(logits_CV.detach().to(wide, copy=True).div_(logits_grad.temperature))
    inputs = [tensor for tensor, need in zip((hidden_CH, *head.params), needed, strict=True) if need]
    grads = iter(torch.autograd.grad(logits_CV, inputs, grad_CV.to(logits_CV.dtype)))
    return [next(grads) if need else None for need in needed]


def _accumulate(total: Tensor | None, grad: Tensor | None, num_chunks: int) -> Tensor | None:
    """Sum over chunks, in float32 or wider when there are several."""
    if grad is None or total is not None:
        return total if grad is None or total is None else total.add_(grad)
    return grad if num_chunks == 1 else grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
