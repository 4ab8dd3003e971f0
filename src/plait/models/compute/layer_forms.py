"""What of a family computes something known: an RMS norm of a known form, a gated MLP of a known activation, a rotation
of queries and keys.

What computes them otherwise, on a CPU (`rms_norm`, `gated_mlp`) or on a GPU (`layer_kernels`), or on both (`rope`),
asks here. Each class, and each function, is held against the formula, to the bit; what computes anything else, or reads
more, has no form.

Shapes: T tokens, H size of a norm, I and O features of an MLP, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAYERS = ("gate_proj", "up_proj", "down_proj")
"""Layers of a gated MLP; its activation is `act_fn`."""


class NormForm(NamedTuple):
    """x / √(mean(x²) + eps) in float32, times (offset + weight)."""

    offset: float
    rounds_first: bool
    """Whether the quotient is rounded to the dtype of x before it meets the weight, in place of the product."""


LLAMA, GEMMA, GPT_OSS = NormForm(0.0, True), NormForm(1.0, False), NormForm(0.0, False)


class Norm(NamedTuple):
    """What an RMS norm computes."""

    form: NormForm
    eps: float


class Gate(Enum):
    """The activation of a gated MLP, down(activation(gate(x)) · up(x))."""

    SILU = "silu"
    GELU_TANH = "gelu, by tanh"


class Rotation(Enum):
    """How queries and keys are rotated by their places."""

    HALVES = "x · cos + turned(x) · sin, where turned puts the negative second half of a head before the first"


def normalised(x: Tensor, weight_H: Tensor, norm: Norm) -> Tensor:
    """[..., H] in the dtype of x, as families write it: seven operations."""
    form, wide = norm.form, x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    if form.rounds_first:
        return (form.offset + weight_H) * wide.to(x.dtype)
    return (wide * (form.offset + weight_H.float())).to(x.dtype)


def activated(gate: Gate, x: Tensor) -> Tensor:
    """The activation of [..., I], as torch computes it."""
    return F.silu(x) if gate is Gate.SILU else F.gelu(x, approximate="tanh")


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`Rotation.HALVES` of [..., T, D], as families write it: cos and sin [..., T, D], of any numbers."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def norm_of(module: nn.Module) -> Norm | None:
    """What a module computes if it is an RMS norm with a weight [H] and nothing else; None if it is not."""
    kind = type(module)
    weight = getattr(module, "weight", None) if kind.__name__.endswith("RMSNorm") else None
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1:
        return None
    names = (name for name in ("variance_epsilon", "eps") if isinstance(getattr(module, name, None), float))
    eps_name = next(names, None)
    form = None if eps_name is None else norm_form(kind, eps_name)
    return None if eps_name is None or form is None else Norm(form, getattr(module, eps_name))


def gate_of(module: nn.Module) -> Gate | None:
    """The activation of a module that is a gated MLP and nothing else; None if it is not."""
    if not all(hasattr(module, name) for name in LAYERS):
        return None
    activation = getattr(module, "act_fn", None)
    if not isinstance(activation, nn.Module) or not is_gated(type(module)):
        return None
    x = torch.linspace(-9, 9, 64, device="cpu")
    return next((gate for gate in Gate if torch.equal(activation(x), activated(gate, x))), None)


@functools.cache
@torch.no_grad()
def norm_form(kind: type[nn.Module], eps_name: str) -> NormForm | None:
    """The form that the class computes in bfloat16, to the bit, of small and large inputs."""
    generator = torch.Generator().manual_seed(0)
    norm = kind.__new__(kind)
    nn.Module.__init__(norm)
    norm.weight = nn.Parameter(torch.randn(24, generator=generator, device="cpu").bfloat16(), requires_grad=False)
    setattr(norm, eps_name, 1e-3)
    scale = torch.logspace(-3, 3, 40, device="cpu")[:, None]
    x = (torch.randn(1, 40, 24, generator=generator, device="cpu") * scale).bfloat16()
    try:
        found = kind.forward(norm, x.clone())
        forms = (LLAMA, GEMMA, GPT_OSS)
        return next((form for form in forms if torch.equal(found, normalised(x, norm.weight, Norm(form, 1e-3)))), None)
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError):
        return None  # it reads more than a weight and an epsilon


@functools.cache
@torch.no_grad()
def is_gated(kind: type[nn.Module]) -> bool:
    """Whether the class computes down(act(gate(x)) · up(x)) of its layers and activation, and nothing else."""
    generator = torch.Generator().manual_seed(0)
    mlp: Any = kind.__new__(kind)
    nn.Module.__init__(mlp)
    for name, shape in zip(LAYERS, ((12, 8), (12, 8), (8, 12)), strict=True):
        layer = nn.Linear(shape[1], shape[0], bias=False, dtype=torch.float64, device="meta")
        weight_OI = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        layer.weight = nn.Parameter(weight_OI, requires_grad=False)
        setattr(mlp, name, layer)
    mlp.act_fn = nn.SiLU()
    x = torch.randn(1, 5, 8, generator=generator, dtype=torch.float64, device="cpu")
    try:
        return torch.equal(kind.forward(mlp, x), mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)))
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError):
        return False  # it reads more than these


@functools.cache
@torch.no_grad()
def rotation_of(function: Callable[..., tuple[Tensor, Tensor]]) -> Rotation | None:
    """How a function (query [1, Hq, T, D], key [1, Hkv, T, D], cos [1, T, D], sin) rotates in bfloat16, to the bit, by
    any cosines and sines; None: in another way."""
    generator = torch.Generator().manual_seed(0)
    query_1THD, key_1THD, cos_1TD, sin_1TD = (
        torch.randn(shape, generator=generator, device="cpu").bfloat16()
        for shape in ((1, 5, 3, 8), (1, 5, 1, 8), (1, 5, 8), (1, 5, 8))
    )
    given = query_1THD.transpose(1, 2), key_1THD.transpose(1, 2)
    expected = [rotated(x, cos_1TD, sin_1TD) for x in given]
    try:
        is_equal = all(map(torch.equal, function(*given, cos_1TD, sin_1TD), expected))
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError):
        return None
    return Rotation.HALVES if is_equal else None
