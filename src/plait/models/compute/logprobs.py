"""Log-probs and entropies of the sampling distribution softmax(logits / temperature), in chunks over the head
(`head_chunks`): the forward keeps the log-sum-exp of each row, and logits as far as it is told to.

    log π(y) = z_y − lse(z)          ∂ log π(y) / ∂z_v = [v = y] − p_v
    H = lse(z) − Σ_v p_v z_v         ∂ H / ∂z_v = −p_v (log p_v + H)            z = logits / temperature

Shapes: R rows (response tokens), C rows of one chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.data.supports import Supports
from plait.models.compute.head_chunks import Buffers, Way, gradients, wide
from plait.models.compute.head_kernels import head_kernels
from plait.models.head import Head


def chunked_logprobs(
    head: Head,
    hidden_RH: Tensor,
    targets_R: Tensor,
    temperature: float,
    rows: int | None = None,
    *,
    likeliest_R: Tensor | None = None,
    kept_bytes: int = 0,
    supports: Supports | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropies under softmax(head(hidden) / temperature).

    Args:
        head: may be cut by vocabulary; then all its ranks call this with the same hidden states and get the same.
        hidden_RH: compute dtype; may require grad.
        targets_R: int64 token ids.
        rows: of one chunk, None: as many as suit the device; changes the memory, and the values only up to the order of
            a matrix product.
        likeliest_R: bool, is filled: whether no token is likelier than the target, by logits in the dtype in which the
            head computes them. Of equally likely ones each is the likeliest.
        kept_bytes: of logits that stay for the backward at most. It does not compute these again; nothing else changes,
            and only where one kernel does all with them (`head_kernels`).
        supports: what each row was drawn from: the softmax is over these tokens alone, the target is one of them, and
            no other token gets a gradient; None: over the whole vocabulary.

    Returns:
        (log-probs [R], entropies [R]) in float32, float64 for a float64 model; once differentiable with respect to
        the hidden states and the head's parameters.
    """
    way = Way.of(head, hidden_RH, temperature, rows, is_fused=head_kernels(head, hidden_RH) is not None)
    if likeliest_R is None:
        likeliest_R = torch.empty_like(targets_R, dtype=torch.bool)
    buffers = Buffers(head, kept_bytes if torch.is_grad_enabled() else 0, supports)
    return _ChunkedLogprobs.apply(way, buffers, targets_R, likeliest_R, hidden_RH, *head.params)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        way: Way,
        buffers: Buffers,
        targets_R: Tensor,
        likeliest_R: Tensor,
        hidden_RH: Tensor,
        *params: Tensor,
    ) -> tuple[Tensor, Tensor]:
        head, temperature = way.head, way.temperature
        logprobs_R, entropies_R, lse_R = hidden_RH.new_empty((3, len(hidden_RH)), dtype=wide(hidden_RH)).unbind()
        compiled = head_kernels(head, hidden_RH)
        for at in way.chunks(len(hidden_RH)):
            if compiled is not None:
                outputs = logprobs_R[at], entropies_R[at], lse_R[at], likeliest_R[at]
                logits_CV = buffers.within_(at, buffers.logits(hidden_RH[at]))
                compiled.logprobs(logits_CV, temperature, targets_R[at], *outputs)
                buffers.keep(at, logits_CV)
                continue
            scaled_CV = buffers.within_(at, buffers.scaled(buffers.logits(hidden_RH[at]), temperature))
            top_C = scaled_CV.amax(-1)
            if head.vocabulary is not None:
                top_C = head.vocabulary.most(top_C)
            shifted_CV = scaled_CV.sub_(top_C[:, None])
            target_C = _at_targets(head, shifted_CV, targets_R[at])
            weights_CV = torch.exp(shifted_CV, out=buffers.room("weights", shifted_CV, shifted_CV.dtype))
            total_C = weights_CV.sum(-1)
            weighted_C = weights_CV.mul_(shifted_CV).sum(-1)
            if head.vocabulary is not None:
                target_C, total_C, weighted_C = head.vocabulary.sums(target_C, total_C, weighted_C)
            likeliest_R[at] = target_C == 0  # its logit is the largest; ranks that lack the target have added zeros
            log_total_C = total_C.log()
            logprobs_R[at] = target_C - log_total_C
            entropies_R[at] = log_total_C - weighted_C / total_C
            lse_R[at] = log_total_C + top_C
        buffers.rest()
        ctx.way, ctx.buffers = way, buffers
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(targets_R, hidden_RH, lse_R, entropies_R)
        return logprobs_R, entropies_R

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs_R: Tensor | None, grad_entropies_R: Tensor | None) -> tuple[Any, ...]:
        targets_R, hidden_RH, lse_R, entropies_R = ctx.saved_tensors
        way: Way = ctx.way
        needed = ctx.needs_input_grad[4:]
        if grad_logprobs_R is None and grad_entropies_R is None:
            return (None,) * (4 + len(needed))

        def grad_of(at: slice) -> _LogitsGrad:
            return _LogitsGrad(
                way.head,
                targets_R[at],
                lse_R[at],
                entropies_R[at],
                None if grad_logprobs_R is None else grad_logprobs_R[at],
                None if grad_entropies_R is None else grad_entropies_R[at],
                way.temperature,
            )

        return None, None, None, None, *gradients(way, ctx.buffers, hidden_RH, needed, grad_of)


@dataclass(frozen=True)
class _LogitsGrad:
    """See `head_chunks.LogitsGrad`."""

    head: Head
    targets_C: Tensor
    lse_C: Tensor
    entropies_C: Tensor
    grad_logprobs_C: Tensor | None
    grad_entropies_C: Tensor | None
    temperature: float

    def __call__(self, scaled_CV: Tensor, out_CV: Tensor) -> Tensor:
        """[C, V] → `out_CV`; the argument is overwritten."""
        logp_CV = scaled_CV.sub_(self.lse_C[:, None])
        grad_CV = torch.exp(logp_CV, out=out_CV)
        if self.grad_entropies_C is not None:
            factor_CV = logp_CV.add_(self.entropies_C[:, None]).mul_(self.grad_entropies_C[:, None])
            if self.grad_logprobs_C is not None:
                factor_CV.add_(self.grad_logprobs_C[:, None])
            grad_CV.mul_(factor_CV).div_(-self.temperature)
        else:
            assert self.grad_logprobs_C is not None, "one of the two gradients is there"
            grad_CV.mul_(self.grad_logprobs_C[:, None] / -self.temperature)
        if self.grad_logprobs_C is not None:
            at_target_C, targets_C = self.grad_logprobs_C / self.temperature, self.targets_C
            if self.head.vocabulary is not None:
                targets_C, has_C = self.head.vocabulary.places(targets_C)
                at_target_C = at_target_C * has_C
            grad_CV.scatter_add_(1, targets_C[:, None], at_target_C[:, None])
        return grad_CV

    def compiled(self, logits_CV: Tensor, hidden_CH: Tensor) -> Tensor | None:
        """The same of logits that are not scaled yet, written over them; see `head_kernels`."""
        if (kernels := head_kernels(self.head, hidden_CH)) is None:
            return None
        return kernels.logprobs_backward_(
            logits_CV,
            self.temperature,
            self.targets_C,
            self.lse_C,
            self.entropies_C,
            self.grad_logprobs_C,
            self.grad_entropies_C,
        )


def _at_targets(head: Head, shifted_CV: Tensor, targets_C: Tensor) -> Tensor:
    """What stands at the targets [C]; 0 where another rank has them."""
    if head.vocabulary is None:
        return shifted_CV.gather(1, targets_C[:, None])[:, 0]
    targets_C, has_C = head.vocabulary.places(targets_C)
    return shifted_CV.gather(1, targets_C[:, None])[:, 0].masked_fill_(~has_C, 0.0)
