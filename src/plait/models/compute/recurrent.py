"""Recurrent layers beside those that attend: linear attention, Mamba-2, short convolutions.

Transformers gives all their mixers one form: `forward(hidden_states, cache, attention_mask)`, which asks the cache for
the states that a batch of sequences begins with and hands it those that it ends with. A mixer whose layer gets the
`context` of our forward passes the row to that; what the context makes of it, segments and the states between them, it
hands back to the family's own code, with a cache that holds these states alone. So no rule of a recurrence is written
here, and on a GPU the family's kernels compute.

Where a family's code for one token is not that for many, it is made to be (`limited`); that all of it is one function
is proven when a model is loaded (`models.mixer_proof`).

Shapes: T tokens of the row, H hidden size, B sequences of L tokens, C channels of a convolution of K taps.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.models.layer_types import recurrent_layers

LEAST_CHUNK = 16
"""Tokens that Mamba-2 takes together at least: blocks of its kernels are as large."""

States = Mapping[tuple[str, int], Tensor]
"""Kind ("conv", "recurrent") and number of a state → [B, …]; none: all are zero."""

Mixer = Callable[[Tensor, States, Tensor | None], tuple[Tensor, States]]
"""inputs [B, L, H], the states before them, and which of them are tokens (bool [B, L]; None: all) → outputs [B, L, H]
and the states behind them. What stands in front of a sequence's tokens must be zeros, and then it begins with none. One
token each, with states before it, has no gradient: those states may be written over."""


class RecurrentContext(Protocol):
    """What becomes of a row in a recurrent layer."""

    def mix(self, layer: int, hidden_TH: Tensor, mixer: Mixer) -> Tensor:
        """[T, H] → [T, H], of the decoder layer with this index."""
        ...


def recurrent_layers_of(config: Any) -> tuple[int, ...]:
    """The recurrent decoder layers, by a configuration of Transformers."""
    return recurrent_layers(getattr(config.get_text_config(), "layer_types", None))


def install(module: Any) -> None:
    """Let the mixers of a module's recurrent layers ask the context of our forward. Without one they stay as they are.

    Args:
        module: of Transformers; changed in place.
    """
    for _, mixer in mixers_of(module):
        mixer.forward = MethodType(_forward, mixer)


def mixers_of(module: Any) -> Iterator[tuple[str, Any]]:
    """(name, module) of the mixers of all recurrent layers in `module`, which may be a pipeline stage. A decoder layer
    that looks like its own mixer is not one."""
    layers = frozenset(recurrent_layers_of(module.config))
    parts = [
        (name, part)
        for name, part in (module.named_modules() if layers else ())
        if getattr(part, "layer_idx", None) in layers and _has_form(part)
    ]
    around = {name.rpartition(".")[0] for name, _ in parts}
    yield from ((name, part) for name, part in parts if name not in around)


def _has_form(part: nn.Module) -> bool:
    names = [*inspect.signature(type(part).forward).parameters]
    return names[1:2] == ["hidden_states"] and names[3:4] == ["attention_mask"] and "position_embeddings" not in names


def _forward(
    mixer: Any, hidden_states: Tensor, *given: Any, context: RecurrentContext | None = None, **named: Any
) -> Tensor:
    """`forward` of a mixer: [1, T, H] → [1, T, H]. The cache has other names in earlier versions of Transformers, and
    the same place."""
    if context is None:
        return type(mixer).forward(mixer, hidden_states, *given, **named)  # type: ignore[no-any-return]
    return context.mix(mixer.layer_idx, hidden_states[0], mixing(mixer)).unsqueeze(0)  # type: ignore[no-any-return]


def mixing(mixer: Any) -> Mixer:
    """What a module of Transformers makes of sequences and the states before them, by its own code."""

    def mix(inputs_BLH: Tensor, before: States, real_BL: Tensor | None) -> tuple[Tensor, States]:
        held, tokens = _Cache(before, real_BL), inputs_BLH.shape[1]
        with limited(mixer, one=tokens == 1 and bool(before)), _in_chunks(mixer, tokens):
            return type(mixer).forward(mixer, inputs_BLH, held, real_BL), held.states

    return mix


@contextmanager
def limited(mixer: Any, *, one: bool) -> Iterator[None]:
    """Within it a Mamba-2 mixer's code for one token has the limits of time steps that its code for many has
    (`time_step_limit`): there Transformers and `mamba_ssm` know none. A time step is softplus(dt + dt_bias), and dt is
    the last part of what its projection gives, in Falcon-H1 times a factor, so that is limited instead."""
    low, high = getattr(mixer, "time_step_limit", None) or (0.0, math.inf)
    if not one or (low <= 0 and high == math.inf):
        yield
        return
    bias_N = mixer.dt_bias.detach()
    factor_N = mixer.mup_vector[0, 0, -mixer.num_heads :] if hasattr(mixer, "mup_vector") else torch.ones_like(bias_N)
    bounds = torch.stack([(_before_softplus(limit) - bias_N) / factor_N for limit in (low, high)]).aminmax(dim=0)

    def limit(module: Any, inputs: Any, projected_BLE: Tensor) -> None:
        projected_BLE[..., -mixer.num_heads :].clamp_(*bounds)

    handle = mixer.in_proj.register_forward_hook(limit)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _in_chunks(mixer: Any, tokens: int) -> Iterator[None]:
    """Within it a Mamba-2 mixer fills up so short sequences to a power of two, not to all of the tokens that it takes
    together (`chunk_size`): its plain code computes and keeps as much for what it fills up with as for tokens."""
    most = getattr(mixer, "chunk_size", None)
    if most is None or tokens > most // 2:
        yield
        return
    mixer.chunk_size = min(most, max(LEAST_CHUNK, 1 << (tokens - 1).bit_length()))
    try:
        yield
    finally:
        mixer.chunk_size = most


def _before_softplus(y: float) -> float:
    """x with softplus(x) = y."""
    return -math.inf if y <= 0 else y + math.log(-math.expm1(-y)) if y < math.inf else y


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
