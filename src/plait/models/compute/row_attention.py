"""How attention over a packed row is computed: in pieces by matrix products, or by one kernel where a device has it.

The kernel is compiled by torch when it is first used, for a device and a kind of attention. It is held then against the
pieces on a small row, forward and backward; where it cannot be compiled or says something else, that is said once and
the pieces are used.

Shapes: T tokens of the row, Hq query heads, Hkv key heads, D head size of queries and keys, E of values.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from plait.data.packed import PackedBatch, pack
from plait.errors import first_line
from plait.models.compute.attention_form import AttentionForm
from plait.models.compute.flex_plan import SMALLEST_HEAD, FlexPlan, Kernel
from plait.models.compute.packed_attention import plan
from plait.observe.screen import say

PROOF_ROOT = 130
PROOF_ROW = ((200, (150, 7)), (3, (1, 300)), (40, ()))
"""Tokens of the prompt behind the root and of each continuation, by group: blocks of every kind, and one that ends
beyond the row."""

LARGEST_ERROR = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}
"""The largest error of a kernel's results beside those of the pieces in float32, as a share of their norm; by dtype,
those that have a kernel. In bfloat16 the pieces themselves are 4e-3 away."""


class RowPlan(Protocol):
    """What every layer of one window does with a batch."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """query [Hq, T, D], key [Hkv, T, D], value [Hkv, T, E] → [T, Hq, E], all in the compute dtype; once
        differentiable. The window of `form` is that of the plan."""
        ...


class Attention(NamedTuple):
    """A kind of attention: a kernel is proven for all rows of it."""

    device: torch.device
    dtype: torch.dtype
    query_heads: int
    key_heads: int
    key_size: int
    value_size: int
    form: AttentionForm
    """Without the sinks themselves."""
    has_sinks: bool


def row_plan(batch: PackedBatch, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> RowPlan:
    """The plan for tensors like these: query [Hq, T, D], key [Hkv, T, D], value [Hkv, T, E], of one dtype."""
    kind = Attention(
        query.device,
        query.dtype,
        query.shape[0],
        key.shape[0],
        key.shape[2],
        value.shape[2],
        replace(form, sinks=None),
        form.sinks is not None,
    )
    if has_kernel(kind) and is_proven(kind):
        return FlexPlan.of(batch, form.window)
    return pieces_plan(batch, query, key, value, form)


def pieces_plan(batch: PackedBatch, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> RowPlan:
    """As `row_plan`, of query [Hq, T, D], in pieces on every device: nothing is compiled for it."""
    return plan(batch, query.shape[0], form.window, query.dtype)


def has_kernel(kind: Attention) -> bool:
    """Whether the device of such an attention has a kernel for its heads and dtype."""
    is_large = min(kind.key_size, kind.value_size) >= SMALLEST_HEAD
    return kind.device.type == "cuda" and is_large and kind.dtype in LARGEST_ERROR


@cache
def is_proven(kind: Attention, kernel: Kernel | None = None) -> bool:
    """Whether the kernel says what the pieces say; said once where it does not."""
    try:
        error = error_of(kind, kernel)
    except Exception as raised:  # torch's compiler may raise anything
        why = f"cannot be compiled here ({type(raised).__name__}: {first_line(raised):.200})"
    else:
        if error <= LARGEST_ERROR[kind.dtype]:
            return True
        why = f"is {error:.2g} away from what attention in pieces says"
    say(f"plait: attention of training by one kernel {why}: it is computed in pieces, slower", file=sys.stderr)
    return False


def error_of(kind: Attention, kernel: Kernel | None = None) -> float:
    """The largest error of the output and of the gradients, each as a share of its norm."""
    groups = [([0] * (PROOF_ROOT + prompt), [[0] * length for length in lengths]) for prompt, lengths in PROOF_ROW]
    batch = pack(groups, kind.device, root_tokens=PROOF_ROOT)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(kind.device, kind.dtype)

    tokens = batch.num_tokens
    inputs = [
        drawn(kind.query_heads, tokens, kind.key_size),
        drawn(kind.key_heads, tokens, kind.key_size),
        drawn(kind.key_heads, tokens, kind.value_size),
    ]
    inputs += [drawn(kind.query_heads)] if kind.has_sinks else []
    grad = drawn(tokens, kind.query_heads, kind.value_size)
    wide = torch.promote_types(kind.dtype, torch.float32)
    expected = _passes(
        plan(batch, kind.query_heads, kind.form.window, wide),
        [tensor.to(wide) for tensor in inputs],
        grad.to(wide),
        kind.form,
    )
    actual = _passes(FlexPlan.of(batch, kind.form.window, kernel), inputs, grad, kind.form)
    return max(float((a.to(wide) - e).norm() / e.norm()) for a, e in zip(actual, expected, strict=True))


def _passes(row_plan: RowPlan, inputs: list[Tensor], grad: Tensor, form: AttentionForm) -> list[Tensor]:
    """The output, and the gradients of the inputs."""
    # The first to ask may be a layer that is computed again in its backward (checkpoint_activations). Its hooks, which
    # count what the layer saves, are kept from what is saved here.
    with torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        query, key, value, *sinks = leaves
        out = row_plan.attend(query, key, value, replace(form, sinks=sinks[0] if sinks else None))
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
