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
        self._numbered: list[tuple[int, nn.Module]] = []
        """The layers and their numbers, as soon as they are asked for: a part of a model is cut before."""
        self._joined: JoinedProducts | None = None

    @contextlib.contextmanager
    def applied(self, context: AttentionContext) -> Iterator[AttentionContext]:
        """Within it a forward of the module computes by fused layers, if it is given the context that this yields.

        Args:
            context: says who attends to whom.

        Raises:
            ModelError: the family does not say which modules they are.
        """
        self._numbered = self._numbered or [(_number(layer), layer) for layer in decoder_layers(self._module)]
        self._joined = self._joined or JoinedProducts([layer for _, layer in self._numbered])
        turn = _Turn(context)
        for number, layer in self._numbered:
            compiled = _compiled(type(layer).forward, self._backend)
            vars(layer)["forward"] = partial(turn.computes, number, compiled, layer)
        _turns.append(turn)
        try:
            with self._joined.applied(), _for_all_sizes():
                yield _Operator()
        finally:
            _turns.pop()
            for _, layer in self._numbered:
                del vars(layer)["forward"]


@contextlib.contextmanager
def _for_all_sizes() -> Iterator[None]:
    """What is compiled within it holds for any number of tokens. By itself torch takes sizes that are equal at first to
    be equal always, such as 128 samples and heads of 128 numbers; and numbers of a layer for such as change."""
    with (
        torch._dynamo.config.patch(recompile_limit=MOST_KINDS, specialize_float=True),
        torch.fx.experimental._config.patch(use_duck_shape=False),
    ):
        yield


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

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """See AttentionContext.attend."""
        return torch.ops.plait.attend(query, key, value, form.scale, form.window, form.softcap, form.sinks)  # type: ignore[no-any-return]


@cache
def _compiled(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """The forward of a kind of layer, for any number of tokens. In bfloat16 numbers are rounded where the plain layers
    round them, so that samples are drawn by what training computes."""
    options = {"emulate_precision_casts": True} if backend == BACKEND else None
    return torch.compile(forward, backend=backend, dynamic=True, fullgraph=True, options=options)


def _attend(
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


def _like_attended(query: Tensor, key: Tensor, value: Tensor, *form: Any) -> Tensor:
    return query.new_empty(query.shape[1], query.shape[0], value.shape[2])


_operators = torch.library.Library("plait", "FRAGMENT")
_operators.define(
    "attend(Tensor query, Tensor key, Tensor value, float scale, int? window, float? softcap, Tensor? sinks) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)
"""query [Hq, T, D], key [Hkv, T, D], value [Hkv, T, E] → [T, Hq, E]. Around a `torch.library.custom_op` it takes as
long as its launches do."""
_operators.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("plait::attend", _like_attended, lib=_operators)
