"""What a forward and its backward do between matrix products, on a CPU in bfloat16: one pass over memory each.

torch computes a gate, a rotation, a norm, a softmax as several operations, each of which moves the activations through
memory. Compiled by numba where it is installed, each is one loop here whose numbers stay in registers. It rounds where
the operations round whose place it takes, and is float32 in between; gradients are rounded once, at the end. A row is
computed from that row alone, to the bit.

In ms on one core of an AMD EPYC (AVX-512, bfloat16), torch in brackets:

    silu(gate) · up of [4096, 688]: 0.74 (1.29), with its backward 1.8 (3.8)
    rotation of 6 heads of [4096, 64]: 0.55 (1.28), with its backward 0.8 (3.5)
    norm of [4096, 256]: 0.33 (0.62), with its backward 0.56 (1.65)
    softmax of a million scores and a bias: 0.53 (0.75); its backward is left to torch, which takes 0.15
    log-probs of [256, 4096] logits with both passes and the products: 5.4 (9.9), of which products are 4.5

and on one of an EPYC without AVX-512 (AVX2), where bfloat16 is rounded by integers: gate 3.4 (4.2), with its backward
8.5 (10.2); rotation 0.9 (2.2), 1.5 (5.6); norm 0.57 (1.31), 1.3 (7.0); softmax 1.2 (1.7).

Numbers of bfloat16 travel as uint16 and are widened in registers (`scalar_intrinsics`).

Shapes: T rows, H hidden size, Hq heads, D head size, B batch of products, M rows of one, K keys, n rows of a bias over
the last C keys, C rows of a chunk of logits, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait import compiled
from plait.compiled import njit

AVAILABLE = compiled.AVAILABLE
"""Whether there is numba, and a CPU with the instructions."""
if AVAILABLE:
    from plait.kernels.scalar_intrinsics import exp, larger, narrow, of_ordered, ordered, supported, widen

    AVAILABLE = supported()


Array = Any
"""A numpy array: a view of a tensor, bfloat16 as uint16."""

PIECE_ROWS = 256
"""Rows whose gradients of a weight are summed before they meet those of others: sums do not depend on threads."""

LEAST_ELEMENTS = 1 << 16
"""Fewer are not worth the hand-over to other threads."""

_ZERO, _ONE, _LOWEST = np.float32(0), np.float32(1), np.float32(-np.inf)
_LEAST = np.float32(-1e4)
"""Log-probs below it count as this where they are weighed: a logit of −∞ has weight 0, and 0 · −∞ is no number."""


def takes(*tensors: Tensor) -> bool:
    """Whether the kernels compute with these, of any shapes: all bfloat16 on this CPU."""
    return AVAILABLE and all(t.dtype == torch.bfloat16 and t.device.type == "cpu" for t in tensors)


def array_of(tensor: Tensor) -> Array:
    """A view of a contiguous tensor, in its shape: bfloat16 as uint16, other dtypes as they are."""
    assert tensor.is_contiguous(), "kernels read rows that lie one after another"
    tensor = tensor.detach()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    """So many at most, begun as they are needed."""
    return ThreadPoolExecutor(count, thread_name_prefix="rows")


def _share_out(run: Callable[[int, int], None], num_rows: int, num_elements: int, step: int = 1) -> None:
    """run(start, stop) over all rows, on as many threads as torch uses; borders are multiples of `step`."""
    num_threads = torch.get_num_threads()
    parts = min(num_threads, -(-num_rows // step))
    if parts == 1 or num_elements < LEAST_ELEMENTS:
        run(0, num_rows)
        return
    steps = -(-num_rows // step)
    borders = [min(steps * part // parts * step, num_rows) for part in range(parts + 1)]
    others = [_threads(num_threads - 1).submit(run, *borders[part : part + 2]) for part in range(1, parts)]
    run(*borders[:2])
    for other in others:
        other.result()


@njit(nogil=True, error_model="numpy", fastmath={"contract"})
def _gated(gate_N, up_N, out_N):
    for i in range(len(out_N)):
        x = widen(gate_N[i])
        out_N[i] = narrow(out_N, widen(narrow(out_N, x / (_ONE + exp(-x)))) * widen(up_N[i]))


@njit(nogil=True, error_model="numpy", fastmath={"contract"})
def _gated_in_place(gate_N, up_N):
    """A function of its own: a loop whose output may be its input under another name is not vectorised."""
    for i in range(len(gate_N)):
        x = widen(gate_N[i])
        gate_N[i] = narrow(gate_N, widen(narrow(gate_N, x / (_ONE + exp(-x)))) * widen(up_N[i]))


@njit(nogil=True, error_model="numpy", fastmath={"contract"})
def _gated_backward(gate_N, up_N, grad_N, grad_gate_N, grad_up_N):
    for i in range(len(grad_N)):
        x, grad = widen(gate_N[i]), widen(grad_N[i])
        share = _ONE / (_ONE + exp(-x))
        grad_up_N[i] = narrow(grad_N, grad * widen(narrow(grad_N, x * share)))
        grad_gate_N[i] = narrow(grad_N, grad * widen(up_N[i]) * share * (_ONE + x * (_ONE - share)))


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, the first factor rounded: contiguous bfloat16 of one shape, to that shape."""
    out = torch.empty_like(gate)
    arrays = [array_of(t.view(-1)) for t in (gate, up, out)]
    _share_out(lambda start, stop: _gated(*(a[start:stop] for a in arrays)), gate.numel(), gate.numel())
    return out


def gated_(gate: Tensor, up: Tensor) -> Tensor:
    """`gated`, of tensors of one shape and dtype, written over the gate, which is returned."""
    arrays = [array_of(t.view(-1)) for t in (gate, up)]
    _share_out(lambda start, stop: _gated_in_place(*(a[start:stop] for a in arrays)), gate.numel(), gate.numel())
    return gate


def gated_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, from them and the gradient of `gated`: all contiguous bfloat16 of one shape."""
    out = torch.empty_like(gate), torch.empty_like(up)
    arrays = [array_of(t.view(-1)) for t in (gate, up, grad, *out)]
    _share_out(lambda start, stop: _gated_backward(*(a[start:stop] for a in arrays)), gate.numel(), gate.numel())
    return out


@njit(nogil=True, error_model="numpy", fastmath={"contract"})
def _rotated(x_THD, cos_TD, sin_TD, out_HTD, start, stop):
    num_heads, size = x_THD.shape[1:]
    half = size // 2
    for t in range(start, stop):
        cos_D, sin_D = cos_TD[t], sin_TD[t]
        for h in range(num_heads):
            x_D, out_D = x_THD[t, h], out_HTD[h, t]
            for d in range(half):
                low, high = widen(x_D[d]), widen(x_D[half + d])
                first = widen(narrow(out_D, low * widen(cos_D[d]))) - widen(narrow(out_D, high * widen(sin_D[d])))
                turned = widen(narrow(out_D, low * widen(sin_D[half + d])))
                second = widen(narrow(out_D, high * widen(cos_D[half + d]))) + turned
                out_D[d] = narrow(out_D, first)
                out_D[half + d] = narrow(out_D, second)


@njit(nogil=True, error_model="numpy", fastmath={"contract"})
def _rotated_backward(grad_HTD, cos_TD, sin_TD, out_THD, start, stop):
    num_heads, size = out_THD.shape[1:]
    half = size // 2
    for t in range(start, stop):
        cos_D, sin_D = cos_TD[t], sin_TD[t]
        for h in range(num_heads):
            grad_D, out_D = grad_HTD[h, t], out_THD[t, h]
            for d in range(half):
                first, second = widen(grad_D[d]), widen(grad_D[half + d])
                out_D[d] = narrow(out_D, first * widen(cos_D[d]) + second * widen(sin_D[half + d]))
                out_D[half + d] = narrow(out_D, second * widen(cos_D[half + d]) - first * widen(sin_D[d]))


def rotated(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """[Hq, T, D] = x · cos + turned(x) · sin, where turned puts the negative second half before the first."""
    out_HTD = x_THD.new_empty(x_THD.shape[1], x_THD.shape[0], x_THD.shape[2])
    arrays = [array_of(t) for t in (x_THD, cos_TD, sin_TD, out_HTD)]
    _share_out(lambda start, stop: _rotated(*arrays, start, stop), len(x_THD), x_THD.numel())
    return out_HTD


def rotated_backward(grad_HTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """The gradient [T, Hq, D] of x."""
    out_THD = grad_HTD.new_empty(grad_HTD.shape[1], grad_HTD.shape[0], grad_HTD.shape[2])
    arrays = [array_of(t) for t in (grad_HTD, cos_TD, sin_TD, out_THD)]
    _share_out(lambda start, stop: _rotated_backward(*arrays, start, stop), len(out_THD), out_THD.numel())
    return out_THD


@njit(nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
def _normalised(x_TH, weight_H, eps, out_TH, inverse_T, start, stop):
    size = len(weight_H)
    for t in range(start, stop):
        x_H, out_H = x_TH[t], out_TH[t]
        total = _ZERO
        for h in range(size):
            x = widen(x_H[h])
            total += x * x
        inverse = _ONE / np.sqrt(total / np.float32(size) + eps)
        inverse_T[t] = inverse
        for h in range(size):
            out_H[h] = narrow(out_H, widen(narrow(out_H, widen(x_H[h]) * inverse)) * widen(weight_H[h]))


@njit(nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
def _normalised_backward(x_TH, weight_H, inverse_T, grad_TH, grad_x_TH, grad_weight_PH, start, stop):
    size = len(weight_H)
    for t in range(start, stop):
        x_H, grad_H, out_H, sum_H = x_TH[t], grad_TH[t], grad_x_TH[t], grad_weight_PH[t // PIECE_ROWS]
        inverse, mean = inverse_T[t], _ZERO
        for h in range(size):
            product = widen(grad_H[h]) * widen(x_H[h]) * inverse
            sum_H[h] += product
            mean += product * widen(weight_H[h])
        mean = mean / np.float32(size)
        for h in range(size):
            normal = widen(x_H[h]) * inverse
            out_H[h] = narrow(out_H, (widen(grad_H[h]) * widen(weight_H[h]) - normal * mean) * inverse)


def normalised(x_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """weight · round(x · i) and i [T] = 1 / √(mean(x²) + eps), float32."""
    out_TH, inverse_T = torch.empty_like(x_TH), x_TH.new_empty(len(x_TH), dtype=torch.float32)
    x, weight, out, inverse = map(array_of, (x_TH, weight_H, out_TH, inverse_T))
    _share_out(
        lambda start, stop: _normalised(x, weight, np.float32(eps), out, inverse, start, stop), len(x), x_TH.numel()
    )
    return out_TH, inverse_T


def normalised_backward(x_TH: Tensor, weight_H: Tensor, inverse_T: Tensor, grad_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x [T, H], and of the weight [H] in float32.

    ∂x = i · (g − n · mean(g · n)),  n = x · i,  g = weight · ∂out.
    """
    grad_x_TH = torch.empty_like(x_TH)
    pieces_PH = torch.zeros(-(-len(x_TH) // PIECE_ROWS), len(weight_H))
    arrays = [array_of(t) for t in (x_TH, weight_H, inverse_T, grad_TH, grad_x_TH, pieces_PH)]
    _share_out(lambda start, stop: _normalised_backward(*arrays, start, stop), len(x_TH), x_TH.numel(), step=PIECE_ROWS)
    return grad_x_TH, pieces_PH.sum(0)


@njit(nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"}, forceinline=True)
def _softmax(scores_K, bias_C, biased_K, probs_K):
    """`probs_K` may be `scores_K`."""
    clear = len(scores_K) - len(bias_C)
    first_K, last_K, out_K = scores_K[:clear], scores_K[clear:], biased_K[clear:]
    most = ordered(_LOWEST)
    for k in range(clear):
        score = widen(first_K[k])
        biased_K[k] = score
        most = larger(most, ordered(score))
    for k in range(len(bias_C)):
        score = widen(last_K[k]) + widen(bias_C[k])
        out_K[k] = score
        most = larger(most, ordered(score))
    top, total = of_ordered(most), _ZERO
    for k in range(len(biased_K)):
        weight = exp(biased_K[k] - top)
        biased_K[k] = weight
        total += weight
    inverse = _ONE / total
    for k in range(len(biased_K)):
        probs_K[k] = narrow(probs_K, biased_K[k] * inverse)


@njit(nogil=True, error_model="numpy")
def _probabilities(scores_RK, bias_NC, start, stop):
    room_K = np.empty(scores_RK.shape[1], np.float32)
    for r in range(start, stop):
        _softmax(scores_RK[r], bias_NC[r % len(bias_NC)], room_K, scores_RK[r])


def probabilities_(scores_BMK: Tensor, bias_nC: Tensor) -> Tensor:
    """softmax(scores + bias) in place: the bias belongs to the last C keys, and row m has its row m mod n."""
    scores, bias = array_of(scores_BMK.view(-1, scores_BMK.shape[-1])), array_of(bias_nC)
    _share_out(lambda start, stop: _probabilities(scores, bias, start, stop), len(scores), scores.size)
    return scores_BMK


@njit(nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
def _logprobs(logits_CV, temperature, targets_C, logprobs_C, entropies_C, lse_C, likeliest_C, start, stop):
    for c in range(start, stop):
        logits_V = logits_CV[c]
        most = ordered(_LOWEST)
        for v in range(len(logits_V)):
            most = larger(most, ordered(widen(logits_V[v])))
        top = of_ordered(most) / temperature
        total, weighted = _ZERO, _ZERO
        for v in range(len(logits_V)):
            shifted = widen(logits_V[v]) / temperature - top
            weight = exp(shifted)
            total += weight
            weighted += weight * max(shifted, _LEAST)
        log_total = np.log(total)
        target = widen(logits_V[targets_C[c]])
        likeliest_C[c] = target == of_ordered(most)
        logprobs_C[c] = target / temperature - top - log_total
        entropies_C[c] = log_total - weighted / total
        lse_C[c] = log_total + top


@njit(nogil=True, error_model="numpy", fastmath={"contract"})
def _logprobs_backward(
    logits_CV, temperature, targets_C, lse_C, entropies_C, grad_logprobs_C, grad_entropies_C, start, stop
):
    inverse = _ONE / temperature
    for c in range(start, stop):
        logits_V = logits_CV[c]
        lse, entropy = lse_C[c], entropies_C[c]
        of_logprob, of_entropy = grad_logprobs_C[c] * inverse, grad_entropies_C[c] * inverse
        target = targets_C[c]
        logprob = max(widen(logits_V[target]) / temperature - lse, _LEAST)
        at_target = of_logprob - exp(logprob) * (of_logprob + (logprob + entropy) * of_entropy)
        if of_entropy == _ZERO:
            for v in range(len(logits_V)):
                logits_V[v] = narrow(logits_V, -exp(widen(logits_V[v]) / temperature - lse) * of_logprob)
        else:
            for v in range(len(logits_V)):
                logprob = max(widen(logits_V[v]) / temperature - lse, _LEAST)
                factor = of_logprob + (logprob + entropy) * of_entropy
                logits_V[v] = narrow(logits_V, -exp(logprob) * factor)
        logits_V[target] = narrow(logits_V, at_target)


def logprobs(
    logits_CV: Tensor,
    temperature: float,
    targets_C: Tensor,
    logprobs_C: Tensor,
    entropies_C: Tensor,
    lse_C: Tensor,
    likeliest_C: Tensor,
) -> None:
    """See `LogprobKernels.logprobs`: [C, V] to [C]."""
    arrays = [array_of(t) for t in (targets_C, logprobs_C, entropies_C, lse_C, likeliest_C)]
    logits, by = array_of(logits_CV), np.float32(temperature)
    _share_out(lambda start, stop: _logprobs(logits, by, *arrays, start, stop), len(logits), logits.size)


def logprobs_backward_(
    logits_CV: Tensor,
    temperature: float,
    targets_C: Tensor,
    lse_C: Tensor,
    entropies_C: Tensor,
    grad_logprobs_C: Tensor | None,
    grad_entropies_C: Tensor | None,
) -> Tensor:
    """See `LogprobKernels.logprobs_backward_`: [C, V]."""
    grads = [torch.zeros_like(lse_C) if g is None else g.contiguous() for g in (grad_logprobs_C, grad_entropies_C)]
    arrays = [array_of(t) for t in (targets_C, lse_C, entropies_C, *grads)]
    logits, by = array_of(logits_CV), np.float32(temperature)
    _share_out(lambda start, stop: _logprobs_backward(logits, by, *arrays, start, stop), len(logits), logits.size)
    return logits_CV


@njit(nogil=True, error_model="numpy")
def _add(total_N, gradient_N):
    for i in range(len(total_N)):
        total_N[i] += widen(gradient_N[i])


def add_widened(total: Tensor, gradient: Tensor) -> None:
    """total += gradient; contiguous float32 and bfloat16 of one shape."""
    totals, gradients = array_of(total.view(-1)), array_of(gradient.view(-1))
    _share_out(lambda start, stop: _add(totals[start:stop], gradients[start:stop]), len(totals), len(totals))
