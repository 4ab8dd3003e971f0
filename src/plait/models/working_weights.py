"""A module's parameters as views of one flat buffer, described by a FlatLayout.

The records come from the module itself: names and shapes, which names are tied, the decoder layer in the name, and
the dim that tensor parallelism would cut, from the family's `tp_plan` (`parallel.mixers`).

A layer that carries adapters is wrapped by peft (`q_proj.base_layer.weight`, `q_proj.lora_A.NAME.weight`). Here it goes
by the name it has without them, and the adapters, which live in buffers of their own (`OwnPart`), are left out.

So is what no text reaches (`unreached`): an encoder of images stays in the module as it was read, beside the buffer.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.layout.params import FlatLayout, Param
from plait.layout.shards import shard
from plait.models.flat_weights import cut_block
from plait.models.lora_settings import LoraSettings
from plait.models.module_names import in_module_order, weights_side_by_side, wildcard
from plait.models.parallel.mixers import tp_plan, widths_of
from plait.models.parallel.whole_experts import DIVIDED
from plait.models.reach import unreached

if TYPE_CHECKING:
    from plait.models.parallel.part import Part

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""Compute dtypes by their names in a recipe."""

HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""Where torch keeps what a module calls before and after its forward."""

_LAYER = re.compile(r"\.(\d+)\.")

_COLUMN_STYLES = {"colwise", "colwise_gather_output", "colwise_rep"}
_ROW_STYLES = {"rowwise", "rowwise_split_input", "rowwise_rep", "mixer_rows"}


def dtype_of(dtype: str) -> torch.dtype:
    """The compute dtype of a name.

    Raises:
        ModelError: the name is none of DTYPES.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


def layout_of(module: nn.Module) -> FlatLayout:
    """The one-rank layout of a module's parameters, in the module's order but for `weights_side_by_side`; tied names
    are aliases of one Param. Without those that no text reaches."""
    plan, widths = tp_plan(module), widths_of(module)
    beside = {id(param) for param in unreached(module)}
    params: list[Param] = []
    aliases: dict[str, str] = {}
    name_of: dict[int, str] = {}
    named = _plain(module, dict(module.named_parameters(remove_duplicate=False)))
    for name, tensor in ((name, named[name]) for name in weights_side_by_side(named)):
        if id(tensor) in beside:
            continue
        if id(tensor) in name_of:
            aliases[name] = name_of[id(tensor)]
            continue
        name_of[id(tensor)] = name
        cut, sections = _cut(name, tuple(tensor.shape), plan)
        of_unit = () if cut is None else widths.get(name) or widths.get(name.rpartition(".")[0], ())
        params.append(Param(name, tuple(tensor.shape), layer_of(name), cut, sections, widths=of_unit))
    return FlatLayout.one_rank(params, aliases)


def in_order_of_modules(layout: FlatLayout) -> FlatLayout:
    """A layout of `layout_of` as it was before weights lay side by side: buffers of early versions are read by it."""
    blocks = {block.param.name: block for block in layout.blocks}
    return FlatLayout(tuple(blocks[name] for name in in_module_order(blocks)), layout.aliases)


def layer_of(name: str) -> int | None:
    """Decoder layer that a parameter's name states."""
    number = _LAYER.search(name)
    return int(number[1]) if number else None


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """The layers that carry adapters (of peft), by name."""
    return {name: layer for name, layer in module.named_modules() if hasattr(layer, "lora_A")}


def plain_state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, each in its shape, by the names that they have without adapters; no
    adapters."""
    return _plain(module, module.state_dict(keep_vars=True))


def _plain(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    adapted = adapted_layers(module)
    kept = {}
    for name, tensor in tensors.items():
        owner = next((layer for layer in _prefixes(name) if layer in adapted), None)
        if owner is None:
            kept[name] = tensor
        elif name.startswith(f"{owner}.base_layer."):
            kept[f"{owner}.{name.removeprefix(f'{owner}.base_layer.')}"] = tensor
    return kept


def _prefixes(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _cut(name: str, shape: tuple[int, ...], plan: Mapping[str, str]) -> tuple[int | None, int]:
    """(cut dim, sections) of a parameter under a Transformers tp_plan, whose keys name modules or bare parameters."""
    generic = wildcard(name)
    owner, _, leaf = generic.rpartition(".")
    style = plan.get(generic) or plan.get(owner)
    last, features = len(shape) - 1, max(0, len(shape) - 2)
    if style in ("mixer_columns", DIVIDED):
        return 0, 1
    if style in _COLUMN_STYLES:
        return features, 1
    if style in _ROW_STYLES:
        return (None, 1) if leaf == "bias" else (last, 1)
    if style == "packed_colwise":
        return features, 2
    if style == "packed_rowwise":
        return (None, 1) if len(shape) == 1 else (last, 2)
    if style == "embedding_rowwise":
        return 0, 1
    if style == "embedding_colwise":
        return 1, 1
    return None, 1


def move_into_flat(module: nn.Module, layout: FlatLayout, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Make every parameter of the layout a view of a new flat buffer, one after another.

    Each old tensor is freed as soon as it is copied, so the peak is one model and one parameter. Buffers (rotary
    frequencies, router biases) keep their dtype and move to the device.

    Returns:
        The buffer [layout.num_elements] in `dtype`; the alignment gaps hold zeros.
    """
    weights = torch.zeros(layout.num_elements, dtype=dtype, device=device)
    for block, start, stop in layout.entries:
        param = module.get_parameter(block.param.name)
        view = weights[start:stop].view(block.shape)
        view.copy_(param.detach())
        param.data = view
        param.grad = None
    for param in unreached(module):
        param.data = param.data.to(dtype)
    module.to(device)
    for block, start, _ in layout.entries:
        address = module.get_parameter(block.param.name).data_ptr()
        assert address == weights.data_ptr() + start * weights.itemsize, f"{block.param.name} is not a view any more"
    return weights


def copy_module(module: Any, layout: FlatLayout) -> tuple[Any, Tensor]:
    """A copy of a module, without adapters, whose parameters are views of a new flat buffer [layout.num_elements].
    Submodules that no text reaches are shared with the original."""
    first = next(module.parameters())
    weights = torch.zeros(layout.num_elements, dtype=first.dtype, device=first.device)
    for block, start, stop in layout.entries:
        weights[start:stop].view(block.shape).copy_(module.get_parameter(block.param.name).detach())
    return _copy(module, layout, lambda start, stop: weights[start:stop]), weights


def skeleton(module: Any, layout: FlatLayout) -> Any:
    """A copy of a module, without adapters and without weights: the parameters of the layout are on the meta device."""
    return _copy(module, layout, lambda start, stop: torch.empty(stop - start, device="meta"))


def _copy(module: Any, layout: FlatLayout, storage: Callable[[int, int], Tensor]) -> Any:
    memo: dict[int, Any] = {id(param): param for param in unreached(module)}
    for block, start, stop in layout.entries:
        param = module.get_parameter(block.param.name)
        memo[id(param)] = nn.Parameter(storage(start, stop).view(block.shape), requires_grad=param.requires_grad)
    adapted = adapted_layers(module)
    for layer in adapted.values():
        memo[id(layer)] = inner = copy.deepcopy(layer.base_layer, memo)
        for kind in HOOKS:  # of a part: see `parallel.adapters`
            getattr(inner, kind).update(copy.deepcopy(getattr(layer, kind), memo))
    twin = copy.deepcopy(module, memo)
    if adapted:
        for part in twin.modules():
            part.__dict__.pop("peft_config", None)
    return twin


@dataclass(frozen=True, eq=False)
class OwnPart:
    """The parameters of a model that shares its backbone with others: an adapter or a head, all that it trains."""

    layout: FlatLayout
    weights: Tensor
    """Flat buffer [layout.num_elements] in the compute dtype."""
    parameters: Mapping[str, nn.Parameter]
    """By the names in the layout; views of `weights`."""
    part: Part
    """This rank's part of it, and the whole."""
    base: Any
    """The model that this one is a view of."""
    view_of: Callable[[Any], Any]
    """Makes the same view, with fresh parameters, of another model like `base`."""
    adapter: str | None = None
    """Name of the adapter in the backbone; None: there is none (a head alone)."""
    settings: LoraSettings | None = None
    """Settings of the adapter."""

    @classmethod
    def allocate(
        cls,
        part: Part,
        value_of: Callable[[Param], Tensor | None],
        like: Tensor,
        device: torch.device | str | None = None,
        **rest: Any,
    ) -> OwnPart:
        """A flat buffer in the dtype and, if no device is named, on the device of `like`.

        Args:
            value_of: the value that a parameter begins with, of its whole shape (None: zeros); asked for each that this
                rank has a block of.
            like: of any shape.
        """
        team = part.team
        layout = shard(part.parameters, team.layout.parallelism, team.tp.index, team.pp.index)
        weights = torch.zeros(layout.num_elements, dtype=like.dtype, device=device or like.device)
        parameters = {}
        for block, start, stop in layout.entries:
            view = weights[start:stop].view(block.shape)
            value = value_of(block.param)
            if value is not None:
                view.copy_(cut_block(value.detach(), block))
            parameters[block.param.name] = nn.Parameter(view)
        return cls(layout, weights, parameters, part, **rest)

    def copied(self) -> Any:
        """The same view of a copy of `base`."""
        view = self.view_of(self.base.copied())
        view.own.weights.copy_(self.weights)
        return view


def adapter_name(own: OwnPart | None) -> str | None:
    """The name of a model's adapter in its backbone; None: it has no adapter."""
    return None if own is None else own.adapter
