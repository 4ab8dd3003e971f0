"""What a decoder of the classic shape keeps where, and how it computes: read off a Transformers module.

The weights are found by the names that all such families use; scales, windows, heads and factors by watching the module
compute. Whatever is of another shape is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.kernels.decoder import GELU_TANH, OFFSET, ROUNDED, SILU
from plait.models.compute.attention_form import AttentionForm

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose angles are a function of the position alone."""


class Refused(Exception):
    """A model has no compiled forward; says why. Caught by `CompiledForward.of`."""


@dataclass(frozen=True)
class Layer:
    """Where a decoder layer keeps what it computes with; weights [O, I] and biases [O] or None, in order of outputs."""

    attention_in: tuple[nn.Linear, ...]
    attention_out: nn.Linear
    mlp_in: tuple[nn.Linear, ...]
    mlp_out: nn.Linear
    norms: tuple[nn.Module, ...]
    """Before attention, before the MLP; then of query and key heads, where it has them."""
    uses_rope: bool


@dataclass
class Call:
    """What a layer asked of its attention."""

    shape: tuple[int, int, int]
    scale: float
    window: int | None
    plain: bool


class Watch:
    """An AttentionContext that notes what each layer asks for."""

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """See AttentionContext.attend."""
        plain = form.softcap is None and form.sinks is None and key.shape[2] == value.shape[2]
        self.calls[layer] = Call((query.shape[0], key.shape[0], key.shape[2]), float(form.scale), form.window, plain)
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[2])


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Refused(otherwise)


def decoder_layers(module: Any) -> list[Any]:
    layers = getattr(module, "layers", None)
    are_layers = isinstance(layers, nn.ModuleList) and len(layers) > 0
    require(are_layers and hasattr(module, "norm") and hasattr(module, "embed_tokens"), "it is not a list of layers")
    return list(layers)  # type: ignore[arg-type]


def parts_of(layer: Any) -> Layer:
    """The parts of a layer of the classic shape, by the names that all such families use."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    norms = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    require(all(part is not None for part in (attention, mlp, *norms)), "its layers are not of the classic shape")
    whole, halves = getattr(attention, "qkv_proj", None), getattr(mlp, "gate_up_proj", None)
    attention_in = (whole,) if whole is not None else _all(attention, "q_proj", "k_proj", "v_proj")
    mlp_in = (halves,) if halves is not None else _all(mlp, "gate_proj", "up_proj")
    head_norms = [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    parts = Layer(
        attention_in,
        *_all(attention, "o_proj"),
        mlp_in,
        *_all(mlp, "down_proj"),
        (*norms, *head_norms),
        bool(getattr(attention, "use_rope", True)),
    )
    linears = (*parts.attention_in, parts.attention_out, *parts.mlp_in, parts.mlp_out)
    require(all(type(linear) is nn.Linear for linear in linears), "its linear layers are wrapped or of another class")
    num_in_parts = sum(parameter.numel() for part in (*linears, *parts.norms) for parameter in part.parameters())
    require(
        num_in_parts == sum(parameter.numel() for parameter in layer.parameters()), "its layers have further weights"
    )
    size = getattr(attention, "head_dim", None)
    sizes_fit = len(head_norms) in (0, 2) and all(tuple(norm.weight.shape) == (size,) for norm in head_norms)
    require(sizes_fit, "its head norms are not over one head")
    return parts


def _all(module: Any, *names: str) -> tuple[Any, ...]:
    modules = tuple(getattr(module, name, None) for name in names)
    require(all(part is not None for part in modules), "its layers are not of the classic shape")
    return modules


def norm_kind(norm: Any) -> tuple[float, int]:
    """Its epsilon, and ROUNDED or OFFSET, which its output on random numbers shows."""
    names = [name for name in ("variance_epsilon", "eps") if isinstance(getattr(norm, name, None), float)]
    weight = getattr(norm, "weight", None)
    require(bool(names) and weight is not None and len(list(norm.parameters())) == 1, "its norms are of another kind")
    eps = getattr(norm, names[0])
    x = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    with torch.no_grad():
        normal = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
        out = norm(x).float()
        for kind, factor in ((ROUNDED, weight.float()), (OFFSET, weight.float() + 1)):
            if torch.allclose(out, normal.float() * factor, rtol=0.02, atol=1e-3):
                return eps, kind
    raise Refused("its norms are of another kind")


def activation(mlp: Any) -> int:
    function = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    require(function is not None, "its MLP has no activation by a known name")
    x = torch.linspace(-6, 6, 49)
    for kind, expected in ((SILU, F.silu(x)), (GELU_TANH, F.gelu(x, approximate="tanh"))):
        if torch.allclose(function(x), expected, rtol=1e-5, atol=1e-5):  # type: ignore[misc]
            return kind
    raise Refused("its activation is another one")


def input_of(args: Any, kwargs: Any) -> Tensor:
    """The hidden states [..., H] among the arguments of a layer's call."""
    return args[0] if args else kwargs["hidden_states"]


def factor_between(embedded: Tensor, entered: Tensor) -> float | None:
    """The factor between the embeddings and what enters the first layer, both [..., H] alike; None for 1."""
    if torch.equal(embedded, entered):
        return None
    wide = embedded.double().flatten()
    ratio = float(wide @ entered.double().flatten() / (wide @ wide))
    rounded = float(torch.tensor(ratio, dtype=embedded.dtype))
    for factor in (rounded, float(f"{ratio:.2g}"), float(f"{ratio:.3g}"), float(f"{ratio:.4g}")):
        if torch.equal(embedded * factor, entered):
            return factor
    near = torch.allclose(embedded * ratio, entered, rtol=2 * torch.finfo(embedded.dtype).eps, atol=0)
    require(near, "its embeddings are changed before the first layer")
    return ratio
