"""The decoder that one or several models compute with: hidden states, activation checkpointing, which adapter is on.

Models that share a backbone (an actor's adapter, a critic's adapter, the reference under both) differ in the adapter
that they switch on before their forward; the weights under it exist once.

Above the last attention every token goes its own way, so the last layer's MLP need compute only the rows that are read.

Shapes: T tokens of a packed row, H hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from plait.layout.params import FlatLayout
from plait.models.attention import AttentionContext
from plait.models.working_weights import OwnPart

READ_SHARE = 0.9
"""Of the rows; where more are read, to leave the others out gains nothing."""


class Backbone:
    """A Transformers decoder (embedding, layers, final norm).

    Args:
        module: the decoder itself, such as a LlamaModel; attention "plait", eval mode.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self._adapted: tuple[tuple[dict[str, Any], frozenset[str]], ...] = ()
        """Of each layer that carries adapters: its attributes, the names of its adapters."""
        self._active: str | None = None
        self._last_mlp = _last_mlp(module)

    def hidden(
        self,
        token_ids_T: Tensor,
        position_ids_T: Tensor,
        context: AttentionContext,
        *,
        adapter: str | None = None,
        checkpoint: bool = False,
        read: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, H] after the final norm, in the compute dtype.

        Args:
            context: says who attends to whom.
            adapter: the one that is added to the weights; None: the weights alone.
            checkpoint: keep one activation per decoder layer and compute the layer again in the backward.
            read: places whose hidden states are asked for, in any order; the others may hold anything. None: all.
        """
        self.activate(adapter)
        with self._checkpointed(adapter) if checkpoint else self._reading(read, len(token_ids_T)):
            out = self.module(
                input_ids=token_ids_T[None], position_ids=position_ids_T[None], use_cache=False, context=context
            )
        return out.last_hidden_state[0]

    def activate(self, adapter: str | None) -> None:
        """Add this adapter, and no other, to the weights from now on; nothing to do where it is on already."""
        if adapter == self._active:
            return
        for attributes, names in self._adapted:
            # peft's own `set_adapter` would also decide which adapters are trained, and takes far longer.
            attributes["_active_adapter"] = [adapter] if adapter in names else []
        self._active = adapter

    def adapted(self, layers: Iterable[Any]) -> None:
        """These layers (peft's) hold adapters now, those of earlier calls among them; none is on."""
        self._adapted = tuple((vars(layer), frozenset(layer.lora_A)) for layer in layers)
        self._active = ""
        self.activate(None)

    @contextlib.contextmanager
    def _reading(self, read: Tensor | None, num_tokens: int) -> Iterator[None]:
        """Within it the last MLP computes these rows alone. (Not with activation checkpoints: those compute the layer
        again when this is over.)"""
        rows = None if read is None or self._last_mlp is None else torch.unique(read)
        if rows is None or len(rows) > READ_SHARE * num_tokens:
            yield
            return
        mlp = self._last_mlp
        mlp.forward = partial(_on_rows, mlp.forward, rows)
        try:
            yield
        finally:
            del mlp.forward

    @contextlib.contextmanager
    def _checkpointed(self, adapter: str | None) -> Iterator[None]:
        layers = _decoder_layers(self.module)
        for layer in layers:
            forward = partial(self._with_adapter, adapter, layer.forward)
            layer.forward = partial(recompute, forward, use_reentrant=False, preserve_rng_state=False)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward

    def _with_adapter(self, adapter: str | None, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The backward computes a layer again perhaps long after another model's forward switched adapters."""
        self.activate(adapter)
        return forward(*args, **kwargs)


class BackboneModel:
    """What a language model and a scalar model have in common; both are dataclasses with these fields."""

    module: Any
    layout: FlatLayout
    weights: Tensor
    backbone: Backbone
    own: OwnPart | None

    @property
    def config(self) -> Any:
        return self.module.config

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.dtype

    @property
    def trained_layout(self) -> FlatLayout:
        """Of what training changes: the parameters that are this model's alone (an adapter, a head), or all."""
        return self.layout if self.own is None else self.own.layout

    @property
    def trained_weights(self) -> Tensor:
        """The flat buffer of `trained_layout`, compute dtype."""
        return self.weights if self.own is None else self.own.weights

    def trained_parameter(self, name: str) -> nn.Parameter:
        """The parameter of this name in `trained_layout`."""
        return self.module.get_parameter(name) if self.own is None else self.own.parameters[name]

    def hidden(
        self,
        token_ids_T: Tensor,
        position_ids_T: Tensor,
        context: AttentionContext,
        *,
        checkpoint: bool = False,
        read: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, H] after the final norm, in the compute dtype; `context` says who attends to whom.

        Args:
            checkpoint: keep one activation per decoder layer and compute the layer again in the backward.
            read: places whose hidden states are asked for; the others may hold anything. None: all.
        """
        adapter = None if self.own is None else self.own.adapter
        return self.backbone.hidden(
            token_ids_T, position_ids_T, context, adapter=adapter, checkpoint=checkpoint, read=read
        )


class Copied(Protocol):
    """A language or a scalar model."""

    module: Any

    def copied(self) -> Any: ...


AnyModel = TypeVar("AnyModel", bound=Copied)


def copy_of(model: AnyModel) -> AnyModel:
    """A frozen copy with buffers of its own: the reference. None of its parameters requires a gradient."""
    twin = model.copied()
    twin.module.requires_grad_(False)
    return twin


def _decoder_layers(module: nn.Module) -> list[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[nn.Module] = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    assert layers, f"{type(module).__name__} marks no decoder layers"
    return layers


def _on_rows(forward: Callable[[Tensor], Tensor], rows: Tensor, x: Tensor) -> Tensor:
    """`forward` of these rows of [1, T, H], zeros elsewhere."""
    out = forward(x[:, rows])
    return out.new_zeros(x.shape).index_copy(1, rows, out)


@torch.no_grad()
def _last_mlp(module: Any) -> Any:
    """The last layer's MLP where it is shown to compute each row for itself; None in float64, which stays exact."""
    layers = [layer for layer in module.modules() if hasattr(layer, "self_attn") and hasattr(layer, "mlp")]
    if not layers:
        return None
    mlp, norm = layers[-1].mlp, getattr(layers[-1], "post_attention_layernorm", None)
    weight = next(mlp.parameters(), None)
    if weight is None or norm is None or weight.dtype == torch.float64 or weight.device.type == "meta":
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 6, module.config.get_text_config().hidden_size, generator=generator)
    x = x.to(weight.device, weight.dtype)
    rows = torch.tensor([1, 2, 4], device=weight.device)
    try:
        whole, part = mlp(x), _on_rows(mlp, rows, x)
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError):
        return None
    near = part.shape == whole.shape and torch.allclose(part[:, rows], whole[:, rows], rtol=0.02, atol=1e-3)
    return mlp if near else None
