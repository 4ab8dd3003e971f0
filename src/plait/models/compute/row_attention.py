"""How attention over a packed row is computed: in pieces by matrix products, or by kernels where a device has them.

On a GPU these are torch's FlashAttention operator for plain attention, and FlexAttention, which torch compiles, for all
other kinds of it, and for rows that the operator is not for. When one of them is first used for a device and a kind of
attention, it is held against the pieces on a small row, forward and backward; where it fails or says something else,
that is said once and the next of these ways is taken, the pieces last.

Shapes: T tokens of the row, Hq query heads, Hkv key heads, D head size of queries and keys, E of values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from plait.data.packed import PackedBatch, pack
from plait.errors import first_line
from plait.models.compute import flash_plan
from plait.models.compute.attention_form import AttentionForm
from plait.models.compute.flash_plan import FlashPlan
from plait.models.compute.flex_plan import SMALLEST_HEAD, FlexPlan
from plait.models.compute.packed_attention import plan
from plait.observe.screen import say

PROOF_ROOT = 130
PROOF_ROW = ((200, (150, 7)), (3, (1, 300)), (40, ()))
"""Tokens of the prompt behind the root and of each continuation, by group: blocks of every kind, and one that ends
beyond the row."""

LARGEST_ERROR = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}
"""The largest error of a way's results beside those of the pieces in float32, as a share of their norm; by dtype,
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


class Way(NamedTuple):
    """A way to compute an attention by kernels."""

    name: str
    planned: Callable[[PackedBatch, Attention], RowPlan]
    instead: str
    """What computes attention instead where this way cannot, in words."""


FLASH = Way(
    "the FlashAttention operator",
    lambda batch, kind: FlashPlan.of(batch, kind.query_heads),
    "by FlexAttention, slower",
)
FLEX = Way("FlexAttention", lambda batch, kind: FlexPlan.of(batch, kind.form.window), "in pieces, slower")


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
    seeing_all = kind._replace(form=replace(kind.form, window=None))
    if has_operator(kind) and flash_plan.takes(batch, form.window) and is_proven(seeing_all, FLASH):
        return FLASH.planned(batch, kind)
    if has_kernel(kind) and is_proven(kind, FLEX):
        return FLEX.planned(batch, kind)
    return pieces_plan(batch, query, key, value, form)


def pieces_plan(batch: PackedBatch, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> RowPlan:
    """As `row_plan`, of query [Hq, T, D], in pieces on every device: nothing is compiled for it."""
    return plan(batch, query.shape[0], form.window, query.dtype)


def has_operator(kind: Attention) -> bool:
    """Whether the FlashAttention operator of such a device is for these heads, their dtype and form."""
    size, form = kind.key_size, kind.form
    is_for_heads = size == kind.value_size <= flash_plan.LARGEST_HEAD and size % flash_plan.HEAD_STEP == 0
    is_plain = form.softcap is None and not kind.has_sinks
    return kind.device.type == "cuda" and kind.dtype in flash_plan.DTYPES and is_for_heads and is_plain


def has_kernel(kind: Attention) -> bool:
    """Whether the device of such an attention has a kernel of FlexAttention for its heads and dtype."""
    is_large = min(kind.key_size, kind.value_size) >= SMALLEST_HEAD
    return kind.device.type == "cuda" and is_large and kind.dtype in LARGEST_ERROR


@cache
def is_proven(kind: Attention, way: Way) -> bool:
    """Whether this way says what the pieces say; said once where it does not."""
    try:
        error = error_of(kind, way)
    except Exception as raised:  # torch, its compiler and Triton may raise anything
        why = f"cannot be used here ({type(raised).__name__}: {first_line(raised):.200})"
    else:
        if error <= LARGEST_ERROR[kind.dtype]:
            return True
        why = f"is {error:.2g} away from what attention in pieces says"
    say(f"plait: {way.name}, for training, {why}: attention is computed {way.instead}", file=sys.stderr)
    return False


def error_of(kind: Attention, way: Way) -> float:
    """The largest error of the output and of the gradients, each as a share of its norm."""
    groups = [([0] * (PROOF_ROOT + prompt), [[0] * length for length in lengths]) for prompt, lengths in PROOF_ROW]
    batch = pack(groups, kind.device, root_tokens=PROOF_ROOT)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(kind.device, kind.dtype)

    tokens = batch.num_tokens
    sizes = (kind.query_heads, kind.key_size), (kind.key_heads, kind.key_size), (kind.key_heads, kind.value_size)
    inputs = [drawn(tokens, *of_each).transpose(0, 1) for of_each in sizes]  # as layers have them
    inputs += [drawn(kind.query_heads)] if kind.has_sinks else []
    grad = drawn(tokens, kind.query_heads, kind.value_size)
    wide = torch.promote_types(kind.dtype, torch.float32)
    expected = _passes(
        plan(batch, kind.query_heads, kind.form.window, wide),
        [tensor.to(wide) for tensor in inputs],
        grad.to(wide),
        kind.form,
    )
    actual = _passes(way.planned(batch, kind), inputs, grad, kind.form)
    errors = [(a.to(wide) - e).norm() / e.norm() for a, e in zip(actual, expected, strict=True)]
    return float(torch.stack(errors).max())  # NaN where there is one


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
