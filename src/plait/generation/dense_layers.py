"""What a decoder of the classic shape keeps where, and how it computes: read off a Transformers module.

The weights are found by the names that all such families use; scales, windows, heads and factors by watching the module
compute. Whatever is of another shape is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.generation.panels import Rows
from plait.generation.refused import Refused, require
from plait.kernels import products
from plait.kernels.decoder import GELU_TANH, OFFSET, ROUNDED, SILU
from plait.kernels.products import TILE_COLUMNS
from plait.models.compute.attention_form import AttentionForm
from plait.models.parallel.stage import PassingLayer
from plait.models.working_weights import adapted_layers

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose angles are a function of the position alone."""

SAME_NORM = 0.01
"""Share of a norm by which rounding may change it."""


@dataclass(frozen=True)
class Adapter:
    """What is added to a linear layer: scale · B (A x)."""

    low: nn.Linear
    """A [rank, I]."""
    high: nn.Linear
    """B [O, rank]."""
    scale: float


@dataclass(frozen=True)
class Projection:
    """A linear layer, weight [O, I] and bias [O] or None, with the adapter that is on; None: nothing is added."""

    linear: nn.Linear
    adapter: Adapter | None


@dataclass(frozen=True)
class Layer:
    """Where a decoder layer keeps what it computes with; projections of one input in order of outputs."""

    attention_in: tuple[Projection, ...]
    attention_out: tuple[Projection, ...]
    mlp_in: tuple[Projection, ...]
    mlp_out: tuple[Projection, ...]
    norms: tuple[nn.Module, ...]
    """Before attention, before the MLP; then of query and key heads, where it has them."""
    uses_rope: bool

    @property
    def products(self) -> tuple[tuple[Projection, ...], ...]:
        """Projections of one input together, in the order in which they are computed."""
        return self.attention_in, self.attention_out, self.mlp_in, self.mlp_out


@dataclass
class Call:
    """What a layer asked of its attention."""

    shape: tuple[int, int, int]
    scale: float
    window: int | None
    plain: bool
    query_norm: float
    """The norm of all queries together, which rope leaves as it is."""


class Watch:
    """An AttentionContext that notes what each layer asks for."""

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """See `AttentionContext.attend`: [Hq, T, D], [Hkv, T, D] and [Hkv, T, E] to [T, Hq, E]."""
        plain = form.softcap is None and form.sinks is None and key.shape[2] == value.shape[2]
        shape, norm = (query.shape[0], key.shape[0], key.shape[2]), float(query.double().norm())
        self.calls[layer] = Call(shape, float(form.scale), form.window, plain, norm)
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[2])


def watched_calls(model: Any, token_ids_T: Tensor) -> list[Call]:
    """What each layer asks of its attention; position alone turns queries, and changes nothing else.

    Args:
        model: a language model of the classic shape.
        token_ids_T: int64 [T].

    Raises:
        Refused: a layer does not attend once, or has queries that grow with the position, however near to rounding.
    """
    near, far, inputs_TH = Watch(), Watch(), entering(model, len(token_ids_T))
    with torch.no_grad():
        model.hidden(token_ids_T, torch.arange(len(token_ids_T)), near, inputs_TH=inputs_TH)
        model.hidden(token_ids_T, torch.full_like(token_ids_T, model.max_positions - 1), far, inputs_TH=inputs_TH)
    layers = decoder_layers(model.module.base_model)
    require(near.calls.keys() == layers.keys(), "its layers do not attend once each")
    norms = ((near.calls[layer].query_norm, far.calls[layer].query_norm) for layer in layers)
    require(all(abs(a - b) <= SAME_NORM * a for a, b in norms), "its queries grow with the position")
    return [near.calls[layer] for layer in layers]


def entering(model: Any, num_tokens: int) -> Tensor | None:
    """Random hidden states [T, H] as of the stage before; None of a model that begins with embeddings.

    Args:
        model: a language model.
    """
    if model.team.is_first_stage:
        return None
    hidden, generator = model.config.get_text_config().hidden_size, torch.Generator().manual_seed(0)
    return torch.randn(num_tokens, hidden, generator=generator).to(model.dtype)


def decoder_layers(module: Any) -> dict[int, Any]:
    """Number → layer, of a decoder of the classic shape; of a stage its own ones.

    Raises:
        Refused: it has another shape.
    """
    layers = getattr(module, "layers", None)
    are_layers = isinstance(layers, nn.ModuleList) and len(layers) > 0
    require(are_layers and hasattr(module, "norm") and hasattr(module, "embed_tokens"), "it is not a list of layers")
    return {number: layer for number, layer in enumerate(layers) if not isinstance(layer, PassingLayer)}  # type: ignore[arg-type]


def parts_of(layer: Any, adapter: str | None) -> Layer:
    """The parts of a layer of the classic shape, by the names that all such families use.

    Args:
        adapter: the one that is on; others that the layer carries add nothing.

    Raises:
        Refused: it has another shape, or more weights than its parts.
    """
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    norms = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    require(all(part is not None for part in (attention, mlp, *norms)), "its layers are not of the classic shape")
    whole, halves = getattr(attention, "qkv_proj", None), getattr(mlp, "gate_up_proj", None)
    attention_in = (whole,) if whole is not None else _all(attention, "q_proj", "k_proj", "v_proj")
    mlp_in = (halves,) if halves is not None else _all(mlp, "gate_proj", "up_proj")
    head_norms = [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    linears = (attention_in, _all(attention, "o_proj"), mlp_in, _all(mlp, "down_proj"))
    parts = Layer(
        *(tuple(_projection(linear, adapter) for linear in group) for group in linears),
        (*norms, *head_norms),
        bool(getattr(attention, "use_rope", True)),
    )
    known = [parameter for norm in parts.norms for parameter in norm.parameters()]
    known += [parameter for group in parts.products for part in group for parameter in part.linear.parameters()]
    for adapted in adapted_layers(layer).values():  # whichever adapter is on
        known += [linear.weight for linears in (adapted.lora_A, adapted.lora_B) for linear in linears.values()]
    ours = sum(parameter.numel() for parameter in known)
    require(ours == sum(parameter.numel() for parameter in layer.parameters()), "its layers have further weights")
    size = getattr(attention, "head_dim", None)
    sizes_fit = len(head_norms) in (0, 2) and all(tuple(norm.weight.shape) == (size,) for norm in head_norms)
    require(sizes_fit, "its head norms are not over one head")
    return parts


def _projection(layer: Any, adapter: str | None) -> Projection:
    linear = getattr(layer, "base_layer", layer)
    require(type(linear) is nn.Linear, "its linear layers are wrapped or of another class")
    if linear is layer or adapter not in layer.lora_A:
        return Projection(linear, None)
    return Projection(linear, Adapter(layer.lora_A[adapter], layer.lora_B[adapter], float(layer.scaling[adapter])))


def _all(module: Any, *names: str) -> tuple[Any, ...]:
    modules = tuple(getattr(module, name, None) for name in names)
    require(all(part is not None for part in modules), "its layers are not of the classic shape")
    return modules


def adapters_of(product: Sequence[Projection]) -> tuple[Rows, Rows]:
    """A [A, I] and B [O, A] of the adapters of projections of one input: those A one under the other, and each B in the
    columns that its own A makes, 0 elsewhere. A is a multiple of TILE_COLUMNS, as A's panels have so many columns."""
    low: Rows = [(part.adapter.low.weight, None) for part in product if part.adapter is not None]
    num_low = sum(len(weight) for weight, _ in low)
    like = low[0][0]
    high_OA = like.new_zeros(sum(part.linear.out_features for part in product), products.panels(num_low) * TILE_COLUMNS)
    row = column = 0
    for part in product:
        size = part.linear.out_features
        if part.adapter is not None:
            rank = len(part.adapter.low.weight)
            high_OA[row : row + size, column : column + rank] = part.adapter.high.weight.detach()
            column += rank
        row += size
    return low, [(high_OA, None)]


def norm_kind(norm: Any) -> tuple[float, int]:
    """Its epsilon, and ROUNDED or OFFSET, which its output on random numbers shows.

    Raises:
        Refused: it is neither.
    """
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
    """SILU or GELU_TANH, which its output on some numbers shows.

    Raises:
        Refused: it is neither, or has no known name.
    """
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
