"""A model's own layers with their small operations fused: each kind of decoder layer is compiled by torch into a few
kernels (norm, rotation, activation and residual between products), with attention over blocks left as it is.

A layer of Transformers is some seventy launches; fused it is some fifteen. It serves steps that are replayed
(`generation.captured`), which prove it before it is used: what torch cannot compile raises, and plain layers are taken.

Shapes: T new tokens, Hq query heads, Hkv key heads, D and E head sizes of keys and of values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.generation.joined_products import JoinedProducts
from plait.models.backbone import decoder_layers
from plait.models.compute.attention import AttentionContext
from plait.models.compute.attention_form import AttentionForm

BACKEND = "inductor"

MOST_KINDS = 64
"""Kinds of layers and of steps that a layer's forward may be compiled for: windows, one sample or several."""


class FusedLayers:
    """The decoder layers of a module.

    Args:
        backend: of `torch.compile`.
    """

    def __init__(self, module: nn.Module, backend: str = BACKEND) -> None:
        self._module, self._backend = module, backend
        self._joined: JoinedProducts | None = None

    @contextlib.contextmanager
    def applied(self, context: AttentionContext) -> Iterator[AttentionContext]:
        """Within it a forward of the module computes by fused layers, if it is given the context that this yields.

        Args:
            context: says who attends to whom.

        Raises:
            ModelError: the family does not say which modules they are.
        """
        attend, layers = _operator(), decoder_layers(self._module)
        self._joined = self._joined or JoinedProducts(layers)
        turn = _Turn(context)
        for layer in layers:
            compiled = _compiled(type(layer).forward, self._backend)
            layer.forward = partial(turn.computes, _number(layer), compiled, layer)
        _turns.append(turn)
        try:
            with self._joined.applied(), torch._dynamo.config.patch(recompile_limit=MOST_KINDS):
                yield _Operator(attend)
        finally:
            _turns.pop()
            for layer in layers:
                del layer.forward


class _Turn:
    """Who attends to whom, and which layer computes now: an operator can be given tensors and numbers alone, and a
    number that is another one for each layer would be compiled for each, or make all numbers of the layers unknown to
    the compiler."""

    def __init__(self, context: AttentionContext) -> None:
        self.context, self.layer = context, 0

    def computes(self, number: int, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """The forward of layer `number` of the model."""
        self.layer = number
        return forward(*given, **named)


def _number(layer: nn.Module) -> int:
    """By which a layer's attention calls itself: a stage of a model has some of the layers."""
    return next(module.layer_idx for module in layer.modules() if isinstance(getattr(module, "layer_idx", None), int))


_turns: list[_Turn] = []
"""The innermost last."""


class _Operator:
    """An AttentionContext that a compiler passes by: the operator looks up who attends to whom when it runs."""

    def __init__(self, attend: Any) -> None:
        self._attend = attend

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """See AttentionContext.attend."""
        return self._attend(query, key, value, form.scale, form.window, form.softcap, form.sinks)


@cache
def _compiled(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """The forward of a kind of layer, for any number of tokens. In bfloat16 numbers are rounded where the plain layers
    round them, so that samples are drawn by what training computes."""
    options = {"emulate_precision_casts": True} if backend == BACKEND else None
    return torch.compile(forward, backend=backend, dynamic=True, fullgraph=True, options=options)


@cache
def _operator() -> Any:
    """The operator `plait::attend`: query [Hq, T, D], key [Hkv, T, D], value [Hkv, T, E] → [T, Hq, E]."""

    @torch.library.custom_op("plait::attend", mutates_args=(), tags=(torch.Tag.flexible_layout,))
    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        turn, form = _turns[-1], AttentionForm(scale, window, softcap, sinks)
        return turn.context.attend(turn.layer, query, key, value, form).contiguous()

    @attend.register_fake
    def _(query: Tensor, key: Tensor, value: Tensor, *form: Any) -> Tensor:
        return query.new_empty(query.shape[1], query.shape[0], value.shape[2])

    return attend
