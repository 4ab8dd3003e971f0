"""Adapters on layers that ranks of tensor parallelism hold in parts.

                    A                                   B
    cut by columns  whole, used for the own outputs     the rows of the own outputs
    cut by rows     the columns of the own inputs       whole, used for a part of every output

So what the whole one does is a part on each rank, and its gradient a partial sum (`Partials`). Where the collectives of
the layer stand, before and behind both, W x and B A x are parts of one sum, or columns side by side: none is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.layout.params import Param
from plait.models.parallel.layer_hooks import Enter
from plait.models.parallel.part import Part
from plait.models.parallel.partial_sums import Partials
from plait.models.working_weights import HOOKS

Host = tuple[Param, Param, Param]
"""The weight that an adapter is added to, with A and B."""


def partials_of(base: Part | None, hosts: Sequence[Host]) -> tuple[Partials, ...]:
    """Which gradients of adapters are partial sums.

    Args:
        base: what they are added to; None: it is whole, and alone.
        hosts: of all layers.
    """
    if base is None or base.team.tp.size == 1:
        return ()
    everyone = tuple(range(base.team.tp.size))
    summed: dict[tuple[int, ...], list[str]] = {everyone: []}
    for weight, a, b in hosts:
        if weight.cut is not None:
            summed[everyone] += [own.name for own in (a, b) if own.cut is None]  # of whole experts neither
    for partial in base.partials:
        with_parts = set(partial.names)
        for weight, a, b in hosts:
            if weight.name in with_parts:
                own = [a.name, b.name] if weight.cut is None else [b.name]
                summed.setdefault(partial.members, []).extend(own)
    return tuple(Partials(tuple(names), members) for members, names in summed.items() if names)


def dress(layer: Any, adapter: str) -> None:
    """Let a layer that carries adapters (of peft) do what the layer in it did before its input and after its output."""
    inner: nn.Module = layer.base_layer
    for kind in HOOKS:
        moved: dict[int, Any] = getattr(inner, kind)
        getattr(layer, kind).update(moved)
        moved.clear()
    if any(isinstance(hook, Enter) and not hook.counts for hook in layer._forward_pre_hooks.values()):
        layer.lora_A[adapter].register_forward_hook(_uncounted)


def _uncounted(low: nn.Module, args: Any, out: Tensor) -> Tensor:
    """Another rank makes this very output too, and its gradient is taken."""
    return _Uncounted.apply(out)  # type: ignore[no-any-return]


class _Uncounted(torch.autograd.Function):
    """Gradients of 0 behind it. The backward goes through all the same: an input that is kept by tokens (`kept_tokens`)
    is gathered there by all ranks, or by none."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)
