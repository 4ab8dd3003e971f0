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

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.layout.params import Param, Parameters
from plait.models.compute import cpu_linear
from plait.models.parallel.collectives import Ranges, copied, gathered
from plait.models.parallel.collectives import split as split_columns
from plait.models.parallel.partial_sums import Partials, sharers
from plait.models.parallel.peers import Peers
from plait.models.parallel.stage import is_idle
from plait.models.parallel.token_split import TokenSplit, partial_parameters, split_tokens
from plait.models.working_weights import wildcard

ENTERING = frozenset({"colwise", "packed_colwise"})
GATHERING = frozenset({"colwise_gather_output", "colwise_rep"})
SPLITTING = frozenset({"rowwise_split_input", "rowwise_rep"})
WEIGHT_STYLES = ENTERING | GATHERING | SPLITTING | {"rowwise", "embedding_rowwise"}
"""Styles of layers with one weight."""


def install(
    module: nn.Module,
    plan: Mapping[str, str],
    parameters: Parameters,
    held: set[str],
    split: TokenSplit,
    config: Any,
) -> tuple[Partials, ...]:
    """Give the modules of a model, whose parameters are this rank's blocks by now, the collectives of their styles.

    Args:
        module: with its head, which stays as it is (`models.vocabulary`).
        plan: style of modules and parameters, by names with `*` for numbers.
        parameters: of the whole model.
        held: names of the parameters that this rank has a block of.
        split: of the ranks that hold it together; whether they part tokens between layers.
        config: of the text model.

    Returns:
        Which gradients are partial sums.

    Raises:
        ModelError: the plan names a style that is not known here, or tokens cannot be parted.
    """
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    installer = _Installer(type(module).__name__, plan, parameters, split, config)
    for name, layer in module.named_modules():
        own = [f"{name}.{leaf}" for leaf, _ in layer.named_parameters() if f"{name}.{leaf}" in held]
        if layer is not head and own and not is_idle(layer):
            installer.install(layer, name, own)
    decoder: Any = module.base_model
    decoder.register_forward_hook(installer.copies.clear)
    if split.splits:
        installer.summed += partial_parameters(module, plan, parameters, held)
        split_tokens(module, split, parameters, held)
    return installer.partials()


class _Installer:
    """Gives layers the collectives of their styles, and remembers whose gradients are partial sums.

    Args:
        family: of the model; in messages.
    """

    def __init__(
        self, family: str, plan: Mapping[str, str], parameters: Parameters, split: TokenSplit, config: Any
    ) -> None:
        self.copies = _Copies(split)
        self._family = family
        self._plan = plan
        self._params = {param.name: param for param in parameters.params}
        self._split = split
        self._tp = split.tp
        self._config = config
        self.summed: list[str] = []
        """Parameters of which every rank has a part of the gradient."""
        self._sharing: list[str] = []
        """Parameters of key-value heads that this rank shares with others."""

    def install(self, layer: nn.Module, name: str, own: Sequence[str]) -> None:
        """Dress one layer.

        Args:
            own: names of its parameters that this rank has a block of.

        Raises:
            ModelError: its style is not known here.
        """
        style = self._plan.get(wildcard(name))
        weight = self._params.get(f"{name}.weight")
        if weight is not None and style in WEIGHT_STYLES:
            self._by_weight(layer, weight, style, own)
        elif style == "moe_tp_experts":
            if any(self._params[leaf].cut is not None for leaf in own):
                layer.register_forward_pre_hook(_EnterExperts(self.copies), with_kwargs=True)
                layer.register_forward_hook(_Reduce(self._split))
        elif style == "mla_kv_a_proj":
            layer.register_forward_hook(_EnterRotary(self.copies, self._config.qk_rope_head_dim))
        elif style == "replicated_with_grad_allreduce":
            self.summed += own
        elif style not in (None, "replicate"):
            raise _refusal(self._family, name, style)
        _state_shape(layer)

    def _by_weight(self, layer: nn.Module, weight: Param, style: str, own: Sequence[str]) -> None:
        """A layer with one weight, which is cut."""
        tp = self._tp
        if style in ENTERING:
            layer.register_forward_pre_hook(_Enter(self.copies))
            if _is_shared(weight, tp.size):
                self._sharing += own
        elif style in GATHERING:
            counts = not _is_shared(weight, tp.size) or sharers(weight, tp.index, tp.size)[0] == tp.index
            layer.register_forward_pre_hook(_Enter(self.copies, counts, _is_shared(weight, tp.size)))
            layer.register_forward_hook(_Gather(tp, _ranges(weight, tp.size)))
        elif style == "embedding_rowwise":
            _cut_embedding(layer, weight.tp_range(tp.index, tp.size), self._split)
        else:
            if style in SPLITTING:
                layer.register_forward_pre_hook(_Split(tp, _ranges(weight, tp.size)))
            _reduce_rows(layer, self._split)

    def partials(self) -> tuple[Partials, ...]:
        """Which gradients of the layers so far are partial sums."""
        tp, partials = self._tp, []
        if self.summed:
            partials.append(Partials(tuple(self.summed), tuple(range(tp.size))))
        if self._sharing:
            members = sharers(self._params[self._sharing[0]], tp.index, tp.size)
            partials.append(Partials(tuple(self._sharing), members))
        return tuple(partials)


def _refusal(family: str, name: str, style: str) -> ModelError:
    return ModelError(
        f"tp: the plan of {family} gives {name!r} the style {style!r}, which plait does not know; set tp to 1."
    )


def _is_shared(param: Param, ways: int) -> bool:
    """Whether several ranks hold the same key-value head; the same on all of them."""
    return param.heads is not None and param.heads.shared and ways > param.heads.groups


def _ranges(param: Param, ways: int) -> Ranges:
    return tuple(param.tp_range(index, ways) for index in range(ways))


class _Copies:
    """f, once for layers that read the same tensor (queries, keys and values; gate and up)."""

    def __init__(self, split: TokenSplit) -> None:
        self.tp, self._split = split.tp, split
        self._last: tuple[Tensor, bool, Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Copies:
        memo[id(self)] = twin = _Copies(copy.deepcopy(self._split, memo))
        return twin

    def __call__(self, x: Tensor, counts: bool = True, shared: bool = False) -> Tensor:
        if self._split.is_on or not (x.requires_grad and torch.is_grad_enabled()):
            return x  # where tokens came together, their gradients will be summed
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
        return split_columns(args[0], self.tp, self.ranges), *args[1:]


@dataclass(eq=False)
class _Reduce:
    split: TokenSplit
    adds_bias: bool = False

    def __call__(self, layer: Any, args: Any, out: Tensor) -> Tensor:
        total = self.split.summed(out)
        return total + layer.bias if self.adds_bias else total


@dataclass(eq=False)
class _WithoutBias:
    """`forward` of a linear layer whose bias is added to the sum."""

    layer: nn.Linear

    def __call__(self, x: Tensor) -> Tensor:
        return cpu_linear.linear(x, self.layer.weight, None)


def _reduce_rows(layer: Any, split: TokenSplit) -> None:
    has_bias = getattr(layer, "bias", None) is not None
    if has_bias:
        layer.forward = _WithoutBias(layer)
    layer.register_forward_hook(_Reduce(split, has_bias))


def _cut_embedding(layer: Any, rows: tuple[int, int], split: TokenSplit) -> None:
    hooks = _EmbeddingRows(*rows, split)
    layer.register_forward_pre_hook(hooks.enter)
    layer.register_forward_hook(hooks.leave)
    if layer.padding_idx is not None:
        local = layer.padding_idx - rows[0]
        layer.padding_idx = local if 0 <= local < rows[1] - rows[0] else None


@dataclass(eq=False)
class _EmbeddingRows:
    start: int
    stop: int
    split: TokenSplit
    _has: list[Tensor] = field(default_factory=list)

    def enter(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids = args[0]
        self._has.append((ids >= self.start) & (ids < self.stop))
        return (ids - self.start).clamp(0, self.stop - self.start - 1), *args[1:]

    def leave(self, layer: nn.Module, args: Any, out: Tensor) -> Tensor:
        return self.split.summed(out * self._has.pop()[..., None])


def _state_shape(layer: nn.Module) -> None:
    """What a layer says of its size is that of its part."""
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, nn.Embedding) and layer.weight.numel():
        layer.num_embeddings = layer.weight.shape[0]
