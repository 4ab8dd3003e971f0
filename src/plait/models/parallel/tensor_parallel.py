"""Tensor parallelism on plain tensors, from the model's own plan.

A plan (Transformers' `tp_plan`) gives modules and parameters a style. What each rank holds of a parameter is the
layout's to say (`plait.layout`); here the modules get hooks that make their parts one whole (`models.collectives`):

    colwise                          f before: each rank computes some of the outputs
    rowwise                          g behind: each rank computes a part of every output; the bias is added once, after
    colwise_gather_output            f before, the columns gathered behind
    rowwise_split_input              the own columns taken before, g behind
    embedding_rowwise                rows of other ranks are zero, g behind
    moe_tp_experts                   f on the hidden states and routing weights, g behind
    mla_kv_a_proj                    f on the columns that go to every head (rotary keys) without another projection
    replicated_with_grad_allreduce   nothing here: the gradients of ranks are partial sums (`Partials`)

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.layout.params import Param, Parameters
from plait.models.compute import cpu_linear
from plait.models.parallel.collectives import Ranges, copied, gathered, reduced, split
from plait.models.parallel.stage import is_idle
from plait.models.parallel.team import Peers
from plait.models.working_weights import wildcard

GATHERING = frozenset({"colwise_gather_output", "colwise_rep"})
SPLITTING = frozenset({"rowwise_split_input", "rowwise_rep"})


@dataclass(frozen=True)
class Partials:
    """Parameters whose gradient on this rank is a part of the sum over some ranks, which hold equal values."""

    names: tuple[str, ...]
    members: tuple[int, ...]
    """Indices along tp, this rank's among them; in order."""


def install(
    module: nn.Module, plan: Mapping[str, str], parameters: Parameters, held: set[str], tp: Peers, config: Any
) -> tuple[Partials, ...]:
    """Give the modules of a model, whose parameters are this rank's blocks by now, the collectives of their styles.

    Args:
        module: with its head, which stays as it is (`models.vocabulary`).
        plan: style of modules and parameters, by names with `*` for numbers.
        parameters: of the whole model.
        held: names of the parameters that this rank has a block of.
        config: of the text model.

    Returns:
        Which gradients are partial sums.

    Raises:
        ModelError: the plan names a style that is not known here.
    """
    params = {param.name: param for param in parameters.params}
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    copies = _Copies(tp)
    summed: list[str] = []
    sharing: list[str] = []
    for name, layer in module.named_modules():
        own = [f"{name}.{leaf}" for leaf, _ in layer.named_parameters() if f"{name}.{leaf}" in held]
        if layer is head or not own or is_idle(layer):
            continue
        weight = params.get(f"{name}.weight")
        style = plan.get(wildcard(name))
        if style in ("colwise", "packed_colwise") and weight is not None:
            layer.register_forward_pre_hook(_Enter(copies))
            if _is_shared(weight, tp.size):
                sharing += own
        elif style in GATHERING and weight is not None:
            counts = not _is_shared(weight, tp.size) or sharers(weight, tp.index, tp.size)[0] == tp.index
            layer.register_forward_pre_hook(_Enter(copies, counts, _is_shared(weight, tp.size)))
            layer.register_forward_hook(_Gather(tp, _ranges(weight, tp.size)))
        elif style == "rowwise" and weight is not None:
            _reduce_rows(layer, tp)
        elif style in SPLITTING and weight is not None:
            layer.register_forward_pre_hook(_Split(tp, _ranges(weight, tp.size)))
            _reduce_rows(layer, tp)
        elif style == "embedding_rowwise" and weight is not None:
            _cut_embedding(layer, weight.tp_range(tp.index, tp.size), tp)
        elif style == "moe_tp_experts":
            if any(params[leaf].cut is not None for leaf in own):
                layer.register_forward_pre_hook(_EnterExperts(copies), with_kwargs=True)
                layer.register_forward_hook(_Reduce(tp))
        elif style == "mla_kv_a_proj":
            layer.register_forward_hook(_EnterRotary(copies, config.qk_rope_head_dim))
        elif style == "replicated_with_grad_allreduce":
            summed += own
        elif style not in (None, "replicate"):
            raise ModelError(
                f"tp: the plan of {type(module).__name__} gives {name!r} the style {style!r}, which plait does not "
                "know; set tp to 1."
            )
        _state_shape(layer)
    decoder: Any = module.base_model
    decoder.register_forward_hook(copies.clear)
    partials = []
    if summed:
        partials.append(Partials(tuple(summed), tuple(range(tp.size))))
    if sharing:
        partials.append(Partials(tuple(sharing), sharers(params[sharing[0]], tp.index, tp.size)))
    return tuple(partials)


def sharers(param: Param, index: int, ways: int) -> tuple[int, ...]:
    """The ranks along tp that hold the same block as rank `index`, in order."""
    own = param.tp_range(index, ways)
    return tuple(other for other in range(ways) if param.tp_range(other, ways) == own)


def _is_shared(param: Param, ways: int) -> bool:
    """Whether several ranks hold the same key-value head; the same on all of them."""
    return param.heads is not None and param.heads.shared and ways > param.heads.groups


def _ranges(param: Param, ways: int) -> Ranges:
    return tuple(param.tp_range(index, ways) for index in range(ways))


class _Copies:
    """f, once for layers that read the same tensor (queries, keys and values; gate and up)."""

    def __init__(self, tp: Peers) -> None:
        self.tp = tp
        self._last: tuple[Tensor, bool, Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Copies:
        memo[id(self)] = twin = _Copies(self.tp)
        return twin

    def __call__(self, x: Tensor, counts: bool = True, shared: bool = False) -> Tensor:
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        # By `shared`, not by `counts`: every rank must come to the same number of nodes.
        if self._last is None or self._last[0] is not x or self._last[1] != shared:
            self._last = (x, shared, copied(x, self.tp, counts=counts))
        return self._last[2]

    def clear(self, *_: Any) -> None:
        self._last = None


@dataclass(eq=False)
class _Enter:
    copies: _Copies
    counts: bool = True
    shared: bool = False

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.copies(args[0], self.counts, self.shared), *args[1:]


@dataclass(eq=False)
class _EnterExperts:
    """Routing weights weigh this rank's part of every expert alone, so their gradients are parts too."""

    copies: _Copies

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(map(self._entered, args)), {key: self._entered(value) for key, value in kwargs.items()}

    def _entered(self, value: Any) -> Any:
        return self.copies(value) if isinstance(value, Tensor) and value.is_floating_point() else value


@dataclass(eq=False)
class _EnterRotary:
    copies: _Copies
    columns: int

    def __call__(self, layer: nn.Module, args: Any, out: Tensor) -> Tensor:
        latent, rotary = out.split([out.shape[-1] - self.columns, self.columns], -1)
        return torch.cat([latent, self.copies(rotary)], -1)


@dataclass(eq=False)
class _Gather:
    tp: Peers
    ranges: Ranges

    def __call__(self, layer: nn.Module, args: Any, out: Tensor) -> Tensor:
        return gathered(out, self.tp, self.ranges)


@dataclass(eq=False)
class _Split:
    tp: Peers
    ranges: Ranges

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return split(args[0], self.tp, self.ranges), *args[1:]


@dataclass(eq=False)
class _Reduce:
    tp: Peers
    adds_bias: bool = False

    def __call__(self, layer: Any, args: Any, out: Tensor) -> Tensor:
        total = reduced(out, self.tp)
        return total + layer.bias if self.adds_bias else total


@dataclass(eq=False)
class _WithoutBias:
    """`forward` of a linear layer whose bias is added to the sum."""

    layer: nn.Linear

    def __call__(self, x: Tensor) -> Tensor:
        return cpu_linear.linear(x, self.layer.weight, None)


def _reduce_rows(layer: Any, tp: Peers) -> None:
    has_bias = getattr(layer, "bias", None) is not None
    if has_bias:
        layer.forward = _WithoutBias(layer)
    layer.register_forward_hook(_Reduce(tp, has_bias))


def _cut_embedding(layer: Any, rows: tuple[int, int], tp: Peers) -> None:
    hooks = _EmbeddingRows(*rows, tp)
    layer.register_forward_pre_hook(hooks.enter)
    layer.register_forward_hook(hooks.leave)
    if layer.padding_idx is not None:
        local = layer.padding_idx - rows[0]
        layer.padding_idx = local if 0 <= local < rows[1] - rows[0] else None


@dataclass(eq=False)
class _EmbeddingRows:
    start: int
    stop: int
    tp: Peers
    _has: list[Tensor] = field(default_factory=list)

    def enter(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids = args[0]
        self._has.append((ids >= self.start) & (ids < self.stop))
        return (ids - self.start).clamp(0, self.stop - self.start - 1), *args[1:]

    def leave(self, layer: nn.Module, args: Any, out: Tensor) -> Tensor:
        return reduced(out * self._has.pop()[..., None], self.tp)


def _state_shape(layer: nn.Module) -> None:
    """What a layer says of its size is that of its part."""
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, nn.Embedding) and layer.weight.numel():
        layer.num_embeddings = layer.weight.shape[0]


def sum_partials(partials: Sequence[Partials], parts: Mapping[str, Tensor], tp: Peers) -> None:
    """Replace the gradients of partial sums by the sums, in place.

    Args:
        parts: name → gradient [elements], a contiguous view of a buffer.
    """
    for partial in partials:
        own = [parts[name] for name in partial.names]
        bucket = torch.cat([part.reshape(-1) for part in own])
        if len(partial.members) == tp.size:
            tp.all_reduce(bucket)
        else:
            bucket = _sum_among(bucket, partial.members, tp)
        for part, total in zip(own, bucket.split([part.numel() for part in own]), strict=True):
            part.copy_(total.view_as(part))


def _sum_among(own: Tensor, members: tuple[int, ...], tp: Peers) -> Tensor:
    """The sum over some of the ranks, in their order."""
    found, transfers = {}, []
    for peer in members:
        if peer != tp.index:
            found[peer] = torch.empty_like(own)
            transfers.append(tp.irecv(found[peer], peer, _SHARERS_TAG, "partial gradients"))
            transfers.append(tp.isend(own, peer, _SHARERS_TAG, "partial gradients"))
    for transfer in transfers:
        transfer.wait()
    total = torch.zeros_like(own)
    for peer in members:
        total += own if peer == tp.index else found[peer]
    return total


_SHARERS_TAG = (1 << 29) + 1
"""Of messages between ranks that share a key-value head."""
