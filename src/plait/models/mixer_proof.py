"""The proof that a recurrent layer is one function, however its tokens are put together: all at once, beside a
longer sequence with zeros in front, in parts that go on from states, and one by one.

Segments of a packed row and steps of generation do all of these, by branches of a family's code that its own forward
of a sample does not pass. The logits that the self-check compares would not tell: there an error of a state may be as
small as the roundings of a narrow dtype. So the layer alone is computed, in a wide one.

Shapes: B sequences of L tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from plait.models.compute.float64 import kept_float64
from plait.models.compute.recurrent import Mixer, States, mixers_of, mixing
from plait.models.mixer_shape import DELTA_RULE_LIBRARY

LONG, SHORT = 9, 6
"""Tokens of two sequences; a convolution has up to four taps."""
FIRST, NEXT = 3, 2
"""Tokens from nothing, and those of a part that goes on; the others come one by one."""

ALLOWED = {torch.float64: 1e-5, torch.float32: 1e-2, torch.bfloat16: 4e-2}
"""Largest accepted error, relative to the norm of what is compared, by the dtype that a layer is proven in. Kernels of
libraries take no float64, and round the factors of float32 products, by which layers err 1e-3 at most; in bfloat16
1e-2. A fault that is no larger is not seen there."""
LIBRARIES = (DELTA_RULE_LIBRARY, "mamba_ssm", "causal_conv1d")
"""Modules by which Transformers computes mixers where they are installed, on GPUs alone."""


@torch.no_grad()
def mixer_fault(module: Any) -> str | None:
    """What is not one function in recurrent layers, in words for a person; None: nothing. Of each class one
    layer is computed.

    Args:
        module: of Transformers, with its weights.
    """
    if (forgetful := forgetful_mixer(module)) is not None:
        return forgetful
    for name, mixer in _one_of_each(module):
        device = next(mixer.parameters()).device
        dtype = dtype_of_proof(mixer, device)
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(LONG + SHORT, module.config.get_text_config().hidden_size, generator=generator)
        error, case = largest_error(_widened(mixer, dtype), hidden.to(device, dtype))
        if not error <= ALLOWED[dtype]:
            return f"`{name}` computes otherwise {case} than all at once, by {error:.2g} of its size"
    return None


def forgetful_mixer(module: Any) -> str | None:
    """Which recurrent layer does not read all of it where several tokens go on from it, in words for a person;
    None: none. Weights may be on the meta device: what is computed there says what depends on what.

    Args:
        module: of Transformers.
    """
    for name, mixer in _one_of_each(module):
        weights = {key: tensor.to("meta") for key, tensor in _named_tensors(_Mixing(mixer))}
        mix = _with_weights(mixer, weights)
        hidden_1LH = torch.empty(1, NEXT, module.config.get_text_config().hidden_size, device="meta")
        hidden_1LH = hidden_1LH.to(next(iter(weights.values())).dtype)
        _, states = mix(hidden_1LH, {}, None)
        with torch.enable_grad():
            before = {key: state.detach().requires_grad_() for key, state in states.items()}
            out_1LH, behind = mix(hidden_1LH, {key: state.clone() for key, state in before.items()}, None)
            told = [tensor.sum() for tensor in (out_1LH, *behind.values()) if tensor.requires_grad]
            read = torch.autograd.grad(sum(told), [*before.values()], allow_unused=True) if told else [None]
        if any(grad is None for grad in read):
            return f"what `{name}` makes of several tokens does not begin with the state that it kept of those before"
    return None


def _one_of_each(module: Any) -> Iterator[tuple[str, Any]]:
    """By name the first layer of each class that keeps a state."""
    seen: set[type[Any]] = set()
    for name, mixer in mixers_of(module):
        if type(mixer) not in seen:
            seen.add(type(mixer))
            yield name, mixer


def dtype_of_proof(mixer: Any, device: torch.device) -> torch.dtype:
    """The widest that a mixer takes on a device."""
    found = {name for name in LIBRARIES if find_spec(name) is not None}
    if device.type == "cpu" or not found:
        return torch.float64
    by_delta_rule = hasattr(mixer, "num_k_heads") and DELTA_RULE_LIBRARY in found
    return next(mixer.parameters()).dtype if by_delta_rule else torch.float32


def largest_error(mixer: Mixer, hidden_TH: Tensor) -> tuple[float, str]:
    """The largest distance of what a mixer gives and keeps from what it does of a sequence by itself, over the size of
    that, and the case.

    Args:
        hidden_TH: inputs of LONG + SHORT tokens.
    """
    inputs = hidden_TH[None, :LONG], hidden_TH[None, LONG:]
    alone = [mixer(each, {}, None) for each in inputs]
    found = []
    cases = ("beside a longer sequence", _together(mixer, *inputs)), ("in parts", _parts(mixer, *inputs))
    for case, computed in cases:
        for (out_BLH, states), (got_BLH, behind) in zip(alone, computed, strict=True):
            pairs = [(got_BLH, out_BLH), *((behind[key], state) for key, state in states.items())]
            found.append((max(_distance(*pair) for pair in pairs), case))
    return max(found)


class _Mixing(nn.Module):
    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, inputs_BLH: Tensor, before: States, real_BL: Tensor | None) -> tuple[Tensor, States]:
        return mixing(self.mixer)(inputs_BLH, before, real_BL)


def _widened(mixer: Any, dtype: torch.dtype) -> Mixer:
    """The same with weights of this dtype."""
    mix = _with_weights(mixer, {name: tensor.to(dtype) for name, tensor in _named_tensors(_Mixing(mixer))})

    def widened(inputs_BLH: Tensor, before: States, real_BL: Tensor | None) -> tuple[Tensor, States]:
        with kept_float64(dtype):
            return mix(inputs_BLH, before, real_BL)

    return widened


def _with_weights(mixer: Any, weights: dict[str, Tensor]) -> Mixer:
    whole = _Mixing(mixer)
    return lambda *given: functional_call(whole, weights, given)


def _named_tensors(whole: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from whole.named_parameters()
    yield from whole.named_buffers()


def _together(mixer: Mixer, long_1LH: Tensor, short_1LH: Tensor) -> Iterator[tuple[Tensor, States]]:
    """Both at once, the shorter one with zeros in front."""
    lacking = LONG - SHORT
    padded = torch.cat([short_1LH.new_zeros(1, lacking, short_1LH.shape[2]), short_1LH], dim=1)
    real_BL = torch.ones(2, LONG, dtype=torch.bool, device=long_1LH.device)
    real_BL[1, :lacking] = False
    out_BLH, states = mixer(torch.cat([long_1LH, padded]), {}, real_BL)
    for row, start in ((0, 0), (1, lacking)):
        yield out_BLH[row : row + 1, start:], {key: state[row : row + 1] for key, state in states.items()}


def _parts(mixer: Mixer, *inputs: Tensor) -> Iterator[tuple[Tensor, States]]:
    """Each in parts, the last of them of one token each."""
    for sequence in inputs:
        sizes = [FIRST, NEXT, *[1] * (sequence.shape[1] - FIRST - NEXT)]
        outputs: list[Tensor] = []
        states: States = {}
        for part in sequence.split(sizes, dim=1):
            before = {key: state.clone() for key, state in states.items()}  # it may be written over
            out_BLH, states = mixer(part, before, None)
            outputs.append(out_BLH)
        yield torch.cat(outputs, dim=1), states


def _distance(got: Tensor, expected: Tensor) -> float:
    """Infinite where one of the two is not finite: `max` passes over what is no number."""
    distance = float((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))
    return distance if isfinite(distance) else inf
