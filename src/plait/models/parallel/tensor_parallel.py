"""Tensor parallelism on plain tensors, from the model's own plan.

A plan (Transformers' `tp_plan`) gives modules and parameters a style. What each rank holds of a parameter is the
layout's to say (`plait.layout`); here the modules get hooks that make their parts one whole (`layer_hooks`):

    colwise                          f before: each rank computes some of the outputs
    rowwise                          g behind: each rank computes a part of every output; the bias is added once, after
    colwise_gather_output            f before, the columns gathered behind
    rowwise_split_input              the own columns taken before, g behind
    embedding_rowwise                rows of other ranks are zero, g behind
    moe_tp_experts                   f on the hidden states and routing weights, g behind: columns of all experts
    ep_dispatch_experts              the same: some of the experts, whole (`whole_experts`)
    mla_kv_a_proj                    f on the columns that go to every head (rotary keys) without another projection
    replicated_with_grad_allreduce   nothing here: the gradients of ranks are partial sums (`Partials`)
    mixer, mixer_columns, mixer_rows f before a recurrent layer, g behind it (`mixers`)

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from plait.errors import ModelError
from plait.layout.params import Param, Parameters
from plait.models.module_names import wildcard
from plait.models.parallel.collectives import Ranges
from plait.models.parallel.layer_hooks import (
    Copies,
    EmbeddingRows,
    Enter,
    EnterExperts,
    EnterMixer,
    EnterRotary,
    Gather,
    LeaveMixer,
    Reduce,
    Split,
    WithoutBias,
)
from plait.models.parallel.mixers import divided_mixers, keep_units
from plait.models.parallel.partial_sums import Partials, sharers
from plait.models.parallel.peers import Peers
from plait.models.parallel.stage import is_idle
from plait.models.parallel.token_split import (
    TokenSplit,
    computed_alike,
    module_of_layer,
    partial_parameters,
    split_tokens,
)
from plait.models.parallel.whole_experts import DISPATCHES, keep_experts

ENTERING = frozenset({"colwise", "packed_colwise"})
GATHERING = frozenset({"colwise_gather_output", "colwise_rep"})
SPLITTING = frozenset({"rowwise_split_input", "rowwise_rep"})
WEIGHT_STYLES = ENTERING | GATHERING | SPLITTING | {"rowwise", "embedding_rowwise"}
"""Styles of layers with one weight."""


def install(
    module: nn.Module,
    plan: Mapping[str, str],
    parameters: Parameters,
    own_names: set[str],
    split: TokenSplit,
    config: Any,
) -> tuple[Partials, ...]:
    """Give the modules of a model, whose parameters are this rank's blocks by now, the collectives of their styles.

    Args:
        module: with its head, which stays as it is (`models.head.Vocabulary`).
        plan: style of modules and parameters, by names with `*` for numbers.
        parameters: of the whole model.
        own_names: names of the parameters that this rank has a block of.
        split: of the ranks that hold it together; whether they part tokens between layers.
        config: of the text model.

    Returns:
        Which gradients are partial sums.

    Raises:
        ModelError: the plan names a style that is not known here, or tokens cannot be sharded.
    """
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    alike = computed_alike(module, plan, parameters, own_names) if split.splits else frozenset[str]()
    installer = _Installer(type(module).__name__, parameters, split, config, alike)
    mixers = divided_mixers(module)
    for name, layer in module.named_modules():
        own = [f"{name}.{leaf}" for leaf, _ in layer.named_parameters() if f"{name}.{leaf}" in own_names]
        if layer is not head and own and not is_idle(layer):
            style = plan.get(wildcard(name))
            if style != "mixer" or name in mixers:  # in Nemotron-H attention and MLPs have the names of mixers
                installer.install(layer, name, style, own)
    decoder: Any = module.base_model
    for copies in installer.copies:
        decoder.register_forward_hook(copies.clear)
    if split.splits:
        installer.summed += partial_parameters(module, plan, parameters, own_names, alike)
        split_tokens(module, split, parameters, own_names, alike)
    return installer.partials()


class _Installer:
    """Gives layers the collectives of their styles, and remembers whose gradients are partial sums.

    Args:
        family: of the model; in messages.
        alike: modules of layers that have all tokens (`token_split.computed_alike`).
    """

    def __init__(
        self, family: str, parameters: Parameters, split: TokenSplit, config: Any, alike: Collection[str]
    ) -> None:
        self._family = family
        self._params = {param.name: param for param in parameters.params}
        self._tp = split.tp
        self._config = config
        self._alike = alike
        self._splits = split, TokenSplit(split.tp, splits=False)
        self.copies = tuple(map(Copies, self._splits))
        """Those of modules between which tokens are sharded, and of those that have all."""
        self.summed: list[str] = []
        """Parameters of which every rank has a part of the gradient."""
        self._sharing: list[str] = []
        """Parameters of key-value heads that this rank shares with others."""

    def install(self, layer: nn.Module, name: str, style: str | None, own: Sequence[str]) -> None:
        """Dress one layer.

        Args:
            style: that the plan gives it.
            own: names of its parameters that this rank has a block of.

        Raises:
            ModelError: its style is not known here.
        """
        weight = self._params.get(f"{name}.weight")
        has_all = module_of_layer(name) in self._alike
        split, copies = self._splits[has_all], self.copies[has_all]
        if weight is not None and style in WEIGHT_STYLES:
            self._by_weight(layer, weight, style, own, has_all)
        elif style in ("moe_tp_experts", DISPATCHES):
            cut = next((self._params[leaf] for leaf in own if self._params[leaf].cut is not None), None)
            if cut is not None:
                layer.register_forward_pre_hook(EnterExperts(copies), with_kwargs=True)
                layer.register_forward_hook(Reduce(split))
            if cut is not None and style == DISPATCHES:
                keep_experts(layer, *cut.tp_range(self._tp.index, self._tp.size))
        elif style == "mixer":
            keep_units(layer, _num_units(own, self._params, self._tp))
            layer.register_forward_pre_hook(EnterMixer(copies), with_kwargs=True)
            layer.register_forward_hook(LeaveMixer(split))
        elif style == "mixer_rows":
            _takes_bias_out(layer)
        elif style == "mla_kv_a_proj":
            layer.register_forward_hook(EnterRotary(copies, self._config.qk_rope_head_dim))
        elif style == "replicated_with_grad_allreduce":
            self.summed += own
        elif style not in (None, "replicate", "mixer_columns"):
            raise _refusal(self._family, name, style)
        _state_shape(layer)

    def _by_weight(self, layer: nn.Module, weight: Param, style: str, own: Sequence[str], has_all: bool) -> None:
        """A layer with one weight, which is cut."""
        tp, split, copies = self._tp, self._splits[has_all], self.copies[has_all]
        if style in ENTERING:
            layer.register_forward_pre_hook(Enter(copies))
            if _is_shared(weight, tp.size):
                self._sharing += own
        elif style in GATHERING:
            counts = not _is_shared(weight, tp.size) or sharers(weight, tp.index, tp.size)[0] == tp.index
            layer.register_forward_pre_hook(Enter(copies, counts, _is_shared(weight, tp.size)))
            layer.register_forward_hook(Gather(tp, _ranges(weight, tp.size)))
        elif style == "embedding_rowwise":
            _cut_embedding(layer, weight.tp_range(tp.index, tp.size), split)
        else:
            if style in SPLITTING:
                layer.register_forward_pre_hook(Split(tp, _ranges(weight, tp.size)))
            _reduce_rows(layer, split)

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


def _num_units(own: Sequence[str], params: Mapping[str, Param], tp: Peers) -> int:
    """Those that this rank has of a mixer with these parameters; all of them are cut alike."""
    start, stop = next(params[name] for name in own if params[name].widths).tp_range(tp.index, tp.size)
    return stop - start


def _is_shared(param: Param, ways: int) -> bool:
    """Whether several ranks hold the same key-value head; the same on all of them."""
    return param.heads is not None and param.heads.shared and ways > param.heads.groups


def _ranges(param: Param, ways: int) -> Ranges:
    return tuple(param.tp_range(index, ways) for index in range(ways))


def _reduce_rows(layer: Any, split: TokenSplit) -> None:
    layer.register_forward_hook(Reduce(split, _takes_bias_out(layer)))


def _takes_bias_out(layer: Any) -> bool:
    """Whether a linear layer has a bias; it does not add it any more."""
    has_bias = getattr(layer, "bias", None) is not None
    if has_bias:
        layer.forward = WithoutBias(layer)
    return has_bias


def _cut_embedding(layer: Any, rows: tuple[int, int], split: TokenSplit) -> None:
    hooks = EmbeddingRows(*rows, split)
    layer.register_forward_pre_hook(hooks.enter)
    layer.register_forward_hook(hooks.leave)
    if layer.padding_idx is not None:
        local = layer.padding_idx - rows[0]
        layer.padding_idx = local if 0 <= local < rows[1] - rows[0] else None


def _state_shape(layer: nn.Module) -> None:
    """What a layer says of its size is that of its part."""
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, nn.Embedding) and layer.weight.numel():
        layer.num_embeddings = layer.weight.shape[0]
