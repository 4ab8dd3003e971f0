"""A module's parameters as views of one flat buffer, described by a FlatLayout.

The records come from the module itself: names and shapes, which names are tied, the decoder layer in the name, and
the dim that tensor parallelism would cut, from the family's own `tp_plan`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from plait.layout.params import FlatLayout, Param

_LAYER = re.compile(r"\.(\d+)\.")

_COLUMN_STYLES = {"colwise", "colwise_gather_output", "colwise_rep"}
_ROW_STYLES = {"rowwise", "rowwise_split_input", "rowwise_rep"}


def layout_of(module: nn.Module) -> FlatLayout:
    """The one-rank layout of a module's parameters, in the module's order; tied names are aliases of one Param."""
    plan: Mapping[str, str] = getattr(module, "tp_plan", None) or {}
    params: list[Param] = []
    aliases: dict[str, str] = {}
    name_of: dict[int, str] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        if id(tensor) in name_of:
            aliases[name] = name_of[id(tensor)]
            continue
        name_of[id(tensor)] = name
        number = _LAYER.search(name)
        cut, sections = _cut(name, tuple(tensor.shape), plan)
        params.append(Param(name, tuple(tensor.shape), int(number[1]) if number else None, cut, sections))
    return FlatLayout.one_rank(params, aliases)


def _cut(name: str, shape: tuple[int, ...], plan: Mapping[str, str]) -> tuple[int | None, int]:
    """(cut dim, sections) of a parameter under a Transformers tp_plan, whose keys name modules or bare parameters."""
    generic = re.sub(r"\d+", "*", name)
    owner, _, leaf = generic.rpartition(".")
    style = plan.get(generic) or plan.get(owner)
    last, features = len(shape) - 1, max(0, len(shape) - 2)
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
    """Make every parameter of the module a view of a new flat buffer, one after another.

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
    module.to(device)
    for block, start, _ in layout.entries:
        address = module.get_parameter(block.param.name).data_ptr()
        assert address == weights.data_ptr() + start * weights.itemsize, f"{block.param.name} is not a view any more"
    return weights
