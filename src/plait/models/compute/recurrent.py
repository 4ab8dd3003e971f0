"""Layers that keep a state beside those that attend: linear attention, short convolutions.

Transformers gives all their mixers one form: `forward(hidden_states, cache, attention_mask)`, which asks the cache for
the states that a batch of sequences begins with and hands it those that it ends with. A mixer whose layer gets the
`context` of our forward passes the row to that; what the context makes of it, segments and the states between them, it
hands back to the family's own code, with a cache that holds these states alone. So no rule of a recurrence is written
here, and on a GPU the family's kernels compute.

Shapes: T tokens of the row, H hidden size, B sequences of L tokens, C channels of a convolution of K taps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.models.mixer_shape import recurrent_layers

States = Mapping[tuple[str, int], Tensor]
"""Kind ("conv", "recurrent") and number of a state → [B, …]; none: all are zero."""

Mixer = Callable[[Tensor, States, Tensor | None], tuple[Tensor, States]]
"""inputs [B, L, H], the states before them, and which of them are tokens (bool [B, L]; None: all) → outputs [B, L, H]
and the states behind them. What stands in front of a sequence's tokens must be zeros, and then it begins with none."""


class RecurrentContext(Protocol):
    """What becomes of a row in a recurrent layer."""

    def mix(self, layer: int, hidden_TH: Tensor, mixer: Mixer) -> Tensor:
        """[T, H] → [T, H], of the decoder layer with this index."""
        ...


def recurrent_layers_of(config: Any) -> tuple[int, ...]:
    """The decoder layers that keep a state, by a configuration of Transformers."""
    return recurrent_layers(getattr(config.get_text_config(), "layer_types", None))


def install(module: Any) -> None:
    """Let the mixers of a module's recurrent layers ask the context of our forward. Without one they stay as they are.

    Args:
        module: of Transformers; changed in place.
    """
    for _, mixer in mixers_of(module):
        mixer.forward = MethodType(_forward, mixer)


def mixers_of(module: Any) -> Iterator[tuple[str, Any]]:
    """Those of a module's recurrent layers, by name; of the layers that it has, where it is a stage."""
    layers = frozenset(recurrent_layers_of(module.config))
    for name, part in module.named_modules() if layers else ():
        if getattr(part, "layer_idx", None) in layers and _has_form(part):
            yield name, part


def _has_form(part: nn.Module) -> bool:
    names = [*inspect.signature(type(part).forward).parameters]
    return names[1:2] == ["hidden_states"] and names[3:4] == ["attention_mask"] and "position_embeddings" not in names


def _forward(
    mixer: Any, hidden_states: Tensor, *given: Any, context: RecurrentContext | None = None, **named: Any
) -> Tensor:
    """`forward` of a mixer: [1, T, H] → [1, T, H]. The cache has other names in earlier versions of Transformers, and
    the same place."""
    own = type(mixer).forward
    if context is None:
        return own(mixer, hidden_states, *given, **named)  # type: ignore[no-any-return]

    def mix(inputs_BLH: Tensor, before: States, real_BL: Tensor | None) -> tuple[Tensor, States]:
        held = _Cache(before, real_BL)
        return own(mixer, inputs_BLH, held, None), held.states

    return context.mix(mixer.layer_idx, hidden_states[0], mix).unsqueeze(0)  # type: ignore[no-any-return]


class _Cache:
    """What a mixer takes for the cache of Transformers. Where gradients are asked for nothing is changed in place."""

    def __init__(self, before: States, real_BL: Tensor | None) -> None:
        self._before, self._real_BL = before, real_BL
        self.states = dict(before)
        """Behind the tokens, when the mixer has run."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """[B, C, K]; a mixer of one token each may write over it where `is_recording_past` is false."""
        return self._before.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """[B, …], as the mixer gave it."""
        return self._before.get(("recurrent", state_idx))

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether states must not be written over."""
        return torch.is_grad_enabled()

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> Tensor:
        """[B, C, L] of the tokens → [B, C, K + L] or, without a state before, [B, C, L]."""
        if self._real_BL is not None:  # a bias of the projection before it would have made something of padding
            conv_states = conv_states * self._real_BL[:, None]
        before = self._before.get(("conv", state_idx))
        joined = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        last = joined[..., -conv_kernel_size:]
        self.states["conv", state_idx] = functional.pad(last, (conv_kernel_size - last.shape[-1], 0))
        return joined

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        """[B, …] behind the tokens; itself."""
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states
