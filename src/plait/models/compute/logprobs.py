"""Log-probs and entropies of the sampling distribution softmax(logits / temperature), in chunks over the head.

With a vocabulary of 49,152 to 262,144 the logits of a batch are its largest tensor by far, so they exist for one
chunk of rows at a time: the forward keeps the log-sum-exp of each row only, and the backward computes a chunk's
logits again. The chunk's buffers are made once per pass and written over: on CPU the page faults of fresh ones cost as
much as the matrix product.

    log π(y) = z_y − lse(z)          ∂ log π(y) / ∂z_v = [v = y] − p_v
    H = lse(z) − Σ_v p_v z_v         ∂ H / ∂z_v = −p_v (log p_v + H)            z = logits / temperature

Shapes: R rows (response tokens), C rows of one chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.kernels import fused_rows
from plait.kernels.logprob_kernels import LogprobKernels
from plait.models.compute import cpu_linear
from plait.models.compute.head_kernels import head_kernels
from plait.models.head import Head
from plait.models.shape import head_chunk_rows


def chunked_logprobs(
    head: Head,
    hidden_RH: Tensor,
    targets_R: Tensor,
    temperature: float,
    rows: int | None = None,
    *,
    likeliest_R: Tensor | None = None,
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

    Returns:
        (log-probs [R], entropies [R]) in float32, float64 for a float64 model; once differentiable with respect to
        the hidden states and the head's parameters.
    """
    assert temperature > 0, f"temperature must be positive, got {temperature}"
    if rows is None:
        vocabulary = max(len(param) for param in head.params) if head.params else 1
        is_fused = head_kernels(head, hidden_RH) is not None
        rows = head_chunk_rows(vocabulary, hidden_RH.itemsize, hidden_RH.device.type, is_fused=is_fused)
    assert rows > 0, f"a chunk needs rows, got {rows}"
    if likeliest_R is None:
        likeliest_R = torch.empty_like(targets_R, dtype=torch.bool)
    return _ChunkedLogprobs.apply(_Way(head, rows, temperature), targets_R, likeliest_R, hidden_RH, *head.params)


@dataclass(frozen=True)
class _Way:
    """What log-probs are computed by, apart from their rows."""

    head: Head
    rows: int
    """Rows of one chunk."""
    temperature: float


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, way: _Way, targets_R: Tensor, likeliest_R: Tensor, hidden_RH: Tensor, *params: Tensor
    ) -> tuple[Tensor, Tensor]:
        head, temperature = way.head, way.temperature
        logprobs_R, entropies_R, lse_R = hidden_RH.new_empty((3, len(hidden_RH)), dtype=_wide(hidden_RH)).unbind()
        buffers = _Buffers(head)
        compiled = head_kernels(head, hidden_RH)
        for at in _chunks(len(hidden_RH), way.rows):
            if compiled is not None:
                outputs = logprobs_R[at], entropies_R[at], lse_R[at], likeliest_R[at]
                compiled.logprobs(buffers.logits(hidden_RH[at]), temperature, targets_R[at], *outputs)
                continue
            scaled_CV = buffers.scaled(buffers.logits(hidden_RH[at]), temperature)
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
        ctx.way = way
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(targets_R, hidden_RH, lse_R, entropies_R)
        return logprobs_R, entropies_R

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs_R: Tensor | None, grad_entropies_R: Tensor | None) -> tuple[Any, ...]:
        targets_R, hidden_RH, lse_R, entropies_R = ctx.saved_tensors
        way: _Way = ctx.way
        head, needed = way.head, ctx.needs_input_grad[3:]
        if grad_logprobs_R is None and grad_entropies_R is None:
            return (None,) * (3 + len(needed))
        buffers = _Buffers(head)
        chunk_grads = _linear_grads if head.linear else _family_grads
        grad_hidden_RH = torch.zeros_like(hidden_RH) if needed[0] else None
        sums: list[Tensor | None] = [None] * len(head.params)
        for at in _chunks(len(hidden_RH), way.rows):
            logits_grad = _LogitsGrad(
                head,
                targets_R[at],
                lse_R[at],
                entropies_R[at],
                None if grad_logprobs_R is None else grad_logprobs_R[at],
                None if grad_entropies_R is None else grad_entropies_R[at],
                way.temperature,
            )
            grad_CH, *grads = chunk_grads(buffers, hidden_RH[at], needed, logits_grad)
            if grad_hidden_RH is not None:
                grad_hidden_RH[at] = grad_CH
            for index, grad in enumerate(grads):
                sums[index] = _accumulate(sums[index], grad, last=at.stop == len(hidden_RH))
        if head.vocabulary is not None and grad_hidden_RH is not None:
            head.vocabulary.peers.all_reduce(grad_hidden_RH)
        params = (None if total is None else total.to(p.dtype) for total, p in zip(sums, head.params, strict=True))
        return None, None, None, grad_hidden_RH, *params


class _Buffers:
    """The tensors [C, V] of one chunk, made at the first chunk (the longest) and written over by the later ones."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self._room: dict[str, Tensor] = {}

    def room(self, purpose: str, like_CV: Tensor, dtype: torch.dtype) -> Tensor:
        """An uninitialised [C, V]."""
        if purpose not in self._room:
            self._room[purpose] = torch.empty_like(like_CV, dtype=dtype, memory_format=torch.contiguous_format)
        return self._room[purpose][: len(like_CV)]

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """Logits in the compute dtype; may be overwritten."""
        if not self.head.linear:
            return self.head.family(hidden_CH)
        weight_VH, bias_V = self.head.weight, self.head.bias
        if cpu_linear.pays(len(hidden_CH), weight_VH):
            return cpu_linear.linear(hidden_CH, weight_VH, bias_V)
        shape_CV = hidden_CH.new_empty(()).expand(len(hidden_CH), len(weight_VH))
        out_CV = self.room("logits", shape_CV, hidden_CH.dtype)
        if bias_V is None:
            return torch.mm(hidden_CH, weight_VH.t(), out=out_CV)
        return torch.addmm(bias_V, hidden_CH, weight_VH.t(), out=out_CV)

    def scaled(self, logits_CV: Tensor, temperature: float) -> Tensor:
        """logits / temperature in float32 or wider; may be overwritten."""
        if logits_CV.dtype == _wide(logits_CV) and self.head.linear:
            scaled_CV = logits_CV
        else:
            scaled_CV = self.room("scaled", logits_CV, _wide(logits_CV)).copy_(logits_CV)
        return scaled_CV if temperature == 1.0 else scaled_CV.div_(temperature)


@dataclass(frozen=True)
class _LogitsGrad:
    """Turns the scaled logits of one chunk into the gradient of the unscaled ones."""

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

    def compiled(self, kernels: LogprobKernels, logits_CV: Tensor) -> Tensor:
        """The same of logits that are not scaled yet, written over them; see `head_kernels`."""
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


def _linear_grads(
    buffers: _Buffers, hidden_CH: Tensor, needed: Sequence[bool], logits_grad: _LogitsGrad
) -> list[Tensor | None]:
    """Gradients of the hidden states [C, H] and of (weight [V, H], bias [V]) where they are needed."""
    logits_CV = buffers.logits(hidden_CH)
    if (kernels := head_kernels(buffers.head, hidden_CH)) is not None:
        grad_CV = narrow_CV = logits_grad.compiled(kernels, logits_CV)
    else:
        scaled_CV = buffers.scaled(logits_CV, logits_grad.temperature)
        grad_CV = logits_grad(scaled_CV, buffers.room("grad", scaled_CV, scaled_CV.dtype))
        narrow_CV = grad_CV if grad_CV.dtype == logits_CV.dtype else logits_CV.copy_(grad_CV)
    weight_VH = buffers.head.weight
    grads = [
        cpu_linear.input_gradient(narrow_CV, weight_VH) if needed[0] else None,
        cpu_linear.weight_gradient(narrow_CV, hidden_CH, weight_VH) if needed[1] else None,
    ]
    if buffers.head.bias is not None:
        grads.append(grad_CV.sum(0) if needed[2] else None)
    return grads


def _family_grads(
    buffers: _Buffers, hidden_CH: Tensor, needed: Sequence[bool], logits_grad: _LogitsGrad
) -> list[Tensor | None]:
    """The same through the family's own head, by automatic differentiation of one chunk."""
    hidden_CH = hidden_CH.detach().requires_grad_(needed[0])
    with torch.enable_grad():
        logits_CV = buffers.head.family(hidden_CH)
    scaled_CV = buffers.scaled(logits_CV.detach(), logits_grad.temperature)
    grad_CV = logits_grad(scaled_CV, buffers.room("grad", scaled_CV, scaled_CV.dtype)).to(logits_CV.dtype)
    inputs = [tensor for tensor, need in zip((hidden_CH, *buffers.head.params), needed, strict=True) if need]
    grads = iter(torch.autograd.grad(logits_CV, inputs, grad_CV))
    return [next(grads) if need else None for need in needed]


def _accumulate(total: Tensor | None, grad: Tensor | None, *, last: bool) -> Tensor | None:
    """Sum over chunks, in float32 or wider as soon as there are several."""
    if grad is None:
        return total
    if total is not None and fused_rows.takes(grad) and total.dtype == torch.float32:
        fused_rows.add_widened(total, grad.contiguous())
        return total
    if total is not None:
        return total.add_(grad)
    return grad if last else grad.to(_wide(grad), copy=True)


def _chunks(num_rows: int, rows: int) -> Iterator[slice]:
    return (slice(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
