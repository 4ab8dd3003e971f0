"""The Triton programs behind `device_logprobs`. Imports triton; TRITON_INTERPRET=1 runs them on a CPU, for tests.

Numbers are float32 in registers, whatever the logits are. A program of `logprobs` walks over one row with a running
maximum, sum and weighted sum (Milakov and Gimelshein 2018, arXiv 1805.02867), so that logits are read once.

Shapes: C rows, V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def logprobs(
    logits,
    temperature,
    targets,
    logprobs_out,
    entropies_out,
    lse_out,
    likeliest_out,
    V: tl.constexpr,
    N: tl.constexpr,
):
    """Grid (C,): of logits [C, V] log-probs of the targets, entropies, log-sum-exps, and whether none is likelier."""
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * V
    highest = -3.0e38  # finite, so that no difference of two is a NaN; of the logits as they are
    top, total, weighted = -3.0e38, 0.0, 0.0
    for first in range(0, V, N):
        at = first + tl.arange(0, N)
        raw = tl.load(base + at, mask=at < V, other=-float("inf")).to(tl.float32)
        highest = tl.maximum(highest, tl.max(raw, 0))
        scaled = raw / temperature
        above = tl.maximum(top, tl.max(scaled, 0))
        shifted = scaled - above
        weights = tl.exp(shifted)
        kept = tl.exp(top - above)
        # A logit of −∞ has weight 0, and 0 · −∞ is no number.
        weighted = kept * (weighted + total * (top - above)) + tl.sum(weights * tl.maximum(shifted, -1.0e4), 0)
        total = kept * total + tl.sum(weights, 0)
        top = above
    target = tl.load(base + tl.load(targets + row)).to(tl.float32)
    log_total = tl.log(total)
    tl.store(logprobs_out + row, target / temperature - top - log_total)
    tl.store(entropies_out + row, log_total - weighted / total)
    tl.store(lse_out + row, log_total + top)
    tl.store(likeliest_out + row, target == highest)


@triton.jit
def logprobs_backward(
    logits,
    temperature,
    targets,
    lse,
    entropies,
    grad_logprobs,
    grad_entropies,
    V: tl.constexpr,
    LOGPROBS: tl.constexpr,
    ENTROPIES: tl.constexpr,
    N: tl.constexpr,
):
    """Grid (C, ⌈V / N⌉): the gradient of the logits, written over them. LOGPROBS, ENTROPIES: which gradients there are;
    the others are not read."""
    row = tl.program_id(0)
    at = tl.program_id(1) * N + tl.arange(0, N)
    places = logits + row.to(tl.int64) * V + at
    is_in = at < V
    logp = tl.load(places, mask=is_in, other=0.0).to(tl.float32) / temperature - tl.load(lse + row)
    weights = tl.exp(logp)
    factor = tl.zeros((N,), tl.float32)
    of_target = tl.zeros((N,), tl.float32)
    if LOGPROBS:
        of_logprob = tl.load(grad_logprobs + row) / temperature
        factor += of_logprob
        of_target += tl.where(at == tl.load(targets + row), of_logprob, 0.0)
    if ENTROPIES:
        of_entropy = tl.load(grad_entropies + row) / temperature
        factor += (tl.maximum(logp, -1.0e4) + tl.load(entropies + row)) * of_entropy
    gradient = of_target - weights * factor
    tl.store(places, gradient.to(logits.dtype.element_ty), mask=is_in)
